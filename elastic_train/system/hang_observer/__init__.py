"""A small process beside a worker that ends it when none of its threads can run any more."""
