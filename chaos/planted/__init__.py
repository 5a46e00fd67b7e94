"""Planted bugs: damage to the files of a valid run that a verdict must find."""
