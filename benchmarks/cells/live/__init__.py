"""The cost of a lost rank in a live job with model parallelism: the watched task, and the figures."""
