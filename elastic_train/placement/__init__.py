"""State in shards: its fixed cut into grains, who holds which, what moves, and sums in which no cut shows. No I/O."""
