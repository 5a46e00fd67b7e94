"""Where a run's settled metrics go beside MLflow: behind one protocol, in threads that training never waits for."""
