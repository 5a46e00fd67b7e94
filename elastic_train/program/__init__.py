"""A step as lists of actions: in which order each rank computes, gathers, sends and adds. Pure arithmetic."""
