"""Models that replace tensors: commit files, training data, weights."""
