"""Streams of more than one source: shares of the weights, the epochs of each source, and which source a place is of."""
