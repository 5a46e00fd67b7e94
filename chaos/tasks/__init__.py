"""What soaks train: a text classifier that takes its time, and the same with a bug planted in the product."""
