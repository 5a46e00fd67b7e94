"""Models that shipped tasks train."""
