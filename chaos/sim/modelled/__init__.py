"""What is modelled in place of tensors: commit files, training data, weights."""
