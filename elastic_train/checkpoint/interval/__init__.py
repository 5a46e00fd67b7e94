"""Checkpoint interval: measured costs, Young's and Daly's optimum, and the cadence that follows."""
