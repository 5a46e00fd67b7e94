"""Invariants of what was applied: every rank agrees, every lane has one owner, every sample counts once an epoch.

Exactly once is shown four ways that share nothing but the result: intervals of the lineage, the row counts of what was
read, the mixed sums against their closed form, and the witness's weights.
"""
