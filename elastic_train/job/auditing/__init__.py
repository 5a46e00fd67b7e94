"""Audits: compute some lanes twice, to find ranks that compute wrongly."""
