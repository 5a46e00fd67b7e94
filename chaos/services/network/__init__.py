"""A network namespace for a node, its cable, and what relays its packets."""
