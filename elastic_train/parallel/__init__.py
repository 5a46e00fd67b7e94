"""Communication between ranks: groups, the gradient sum and its exchange, and the step tables."""
