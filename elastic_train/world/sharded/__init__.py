"""Worlds whose state is in shards: what every rank brings, what is pending, who holds what from then on."""
