"""Commits: records, their writer and reader, lookup, retention, sweeping and export."""
