"""Compute a layout's memory, traffic, step time and goodput on a cluster, without touching tensors."""
