"""Figures of a run's report, each a function from reports to SVG."""
