"""What cells cost beside torch's own parts, and what shows of them in the weights."""
