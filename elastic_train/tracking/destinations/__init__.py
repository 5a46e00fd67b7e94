"""Destinations of settled metrics other than MLflow, behind one protocol, in threads that training never waits for."""
