"""What the trainer reaches on a GPU, beside a plain loop of the same model."""
