"""Model parallelism: the state of a rank in a cell, the group of ranks that together hold one replica."""
