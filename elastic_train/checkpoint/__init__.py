"""Commits: published checkpoints, their stores, and how they are written, found, read and kept."""
