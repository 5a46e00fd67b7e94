"""Parse a run's evidence: histories, commits, results, and the windows that faults explain."""
