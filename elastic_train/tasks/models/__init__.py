"""The models that shipped tasks train."""
