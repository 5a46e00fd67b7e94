"""Mixtures of sources: shares from weights, epochs of each source, and the source of each position."""
