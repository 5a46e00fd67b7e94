"""A model's units: its blocks and the rest; in which order they run, and which are computed again."""
