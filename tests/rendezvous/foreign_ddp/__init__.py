"""A minimal DDP script of a user that does not know this package, as a module and as a file."""
