"""Datasets: manifest, schema, row groups and lengths, description and verification."""
