"""A world of ranks: forming it, agreeing, restoring, handing state over, fencing."""
