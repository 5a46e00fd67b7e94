"""What a run has left: histories, commits, results, and the windows that faults explain."""
