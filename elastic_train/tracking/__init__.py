"""What a run reports: history, metric log, progress, and MLflow."""
