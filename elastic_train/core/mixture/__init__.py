"""Streams of more than one source: shares of the weights, the epochs of each source, and who gets which place."""
