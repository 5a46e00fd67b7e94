"""What becomes of a run's model: it is opened from a commit, evaluated, exported, and asked to go on with a text."""
