"""Attention on GPUs: the fastest kernel with reproducible bits, chosen once at start, the same on all ranks."""
