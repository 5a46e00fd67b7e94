"""The verdict on a run, from its files alone: imports nothing of what it judges."""
