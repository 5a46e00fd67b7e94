"""The package's own decoder, its experts, how it is cut, and what it is called by transformers."""
