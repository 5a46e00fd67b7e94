"""A world of ranks: forming it, agreeing, restoring state, and fencing."""
