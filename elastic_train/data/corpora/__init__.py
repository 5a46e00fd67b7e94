"""Datasets made here: from text, from docstrings, and synthetic ones."""
