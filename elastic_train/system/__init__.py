"""Wrappers for the operating system and libraries: signals, locks, threads, files, failpoints."""
