"""A simulated job: nodes of both modes, the product on a simulated machine, and its faults."""
