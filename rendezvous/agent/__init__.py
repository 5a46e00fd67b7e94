"""What a node's agent answers at its port: which node it is, and how fast the link to it is."""
