"""Judge a run from its files alone; imports nothing of what it judges."""
