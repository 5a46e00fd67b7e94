"""Invariants of a run's files: each exists, and files that state the same fact agree."""
