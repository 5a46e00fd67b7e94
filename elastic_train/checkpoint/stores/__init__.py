"""Stores of commits: local folders and object stores, with checksums and deadlines."""
