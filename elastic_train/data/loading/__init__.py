"""From an order to micro-batches: read ahead, decode, cache, and build every lane's batch."""
