"""A job of real processes on this machine, and what is done to it."""
