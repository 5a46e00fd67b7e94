"""Invariants of the files of a run: each is there, and two that state the same fact agree."""
