"""Sharded state: the shards of each rank, their updates, and their form in commits."""
