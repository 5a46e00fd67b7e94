"""Proofs from commits: coverage of every sample, and which samples break it."""
