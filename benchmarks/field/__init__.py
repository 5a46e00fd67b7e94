"""Estimate recovery and goodput of large worlds from measured parts, next to the published figures of other systems."""
