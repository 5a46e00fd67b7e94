"""From an order to micro-batches: read ahead, decode, cache, and build the batch of every lane."""
