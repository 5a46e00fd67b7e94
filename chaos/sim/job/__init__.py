"""A simulated job: nodes of both modes, the product installed on a simulated machine, its faults."""
