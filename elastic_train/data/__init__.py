"""Datasets: manifests, reading by sample id, and feeding lanes."""
