"""State in shards: what a rank holds by its seat, how it is updated, and how commits have it."""
