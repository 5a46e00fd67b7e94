"""What a layout of a model on a cluster comes to: memory, traffic, seconds, goodput. No tensors are touched."""
