"""A rank's memory: measured periodically, and recorded when it runs out."""
