"""The port of a node's agent: it identifies the node, and measures the link to it."""
