"""Saves in the background: staging, the writer thread, part receipts, and abandonment."""
