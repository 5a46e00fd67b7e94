"""What the ranks of one cell exchange while they compute a lane together."""
