"""What ranks do together: groups, the gradient sum and its exchange, and the table of lanes."""
