"""Invariants of what a run has written: every file is there, and what is said in two places is said alike."""
