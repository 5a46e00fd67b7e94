"""The order of samples: padding, and how well it shuffles."""
