"""The cost of model parallelism compared with torch's own, and its effect on the weights."""
