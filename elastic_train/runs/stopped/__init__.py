"""The cause of a run's stop, and the remedy."""
