"""A network namespace for a node, its cable, and the relay of its packets."""
