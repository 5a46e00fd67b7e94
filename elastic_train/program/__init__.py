"""A step as lists of actions: the order in which each rank computes, gathers, sends and adds. Pure arithmetic."""
