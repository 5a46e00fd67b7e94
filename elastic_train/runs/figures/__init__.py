"""Figures of a run's report: functions from reports to SVG."""
