"""Report on a run: history, metric log, progress, and MLflow."""
