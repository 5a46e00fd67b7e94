"""Faults on purpose: scenarios, an executor with real processes, and a checker that trusts nothing but files."""
