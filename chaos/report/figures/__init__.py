"""Figures of the report, one per module: functions from a story, or from evidence, to SVG."""
