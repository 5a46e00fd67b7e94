"""Invariants of every run: one module per group."""
