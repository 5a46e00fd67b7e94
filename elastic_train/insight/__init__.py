"""Monitoring of a run, without influence on its results: phases of every rank, events, metrics pages, traces."""
