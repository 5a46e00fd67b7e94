"""Attention on GPUs: the fastest kernel that repeats its bits, chosen once at start, the same on all ranks."""
