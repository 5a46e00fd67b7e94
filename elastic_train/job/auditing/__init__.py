"""Audits: lanes that are computed twice, to find ranks that compute wrongly."""
