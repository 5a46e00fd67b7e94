"""The trainer's performance on a GPU, compared with a plain loop of the same model."""
