"""Images on their way into a model: how they are cut, flipped, mixed and normalised."""
