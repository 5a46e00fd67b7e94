"""The cost of a lost rank in a live job with sharded state: the watched task, and the figures."""
