"""A run's self-observation and its cost, one module per part."""
