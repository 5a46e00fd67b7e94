"""What a lost rank costs a live job of cells: the task that watches, and the figures."""
