"""Weight updates: the optimizer, its learning-rate schedule, and the moving average of the weights."""
