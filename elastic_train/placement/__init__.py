"""Sharding: the fixed cut of state into grains, their holders and transfers, and sums that no cut affects. No I/O."""
