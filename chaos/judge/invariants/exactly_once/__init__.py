"""Invariants of applied steps: ranks agree, every lane has one owner, every sample counts once an epoch.

Exactly-once is shown four independent ways: intervals of the lineage, row counts of what was read, mixed sums against
their closed form, and the witness's weights.
"""
