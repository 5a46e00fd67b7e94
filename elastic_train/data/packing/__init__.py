"""Documents packed into rows of one length, with their boundaries kept."""
