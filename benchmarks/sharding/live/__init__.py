"""What a lost rank costs a live job with state in shards: the task that watches, and the figures."""
