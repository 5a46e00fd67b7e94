"""The package's own decoder: experts, sizes, and conversion to transformers."""
