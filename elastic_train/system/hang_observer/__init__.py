"""A small process next to a worker that ends it when none of its threads can run any more."""
