"""Where jobs run: is a node fit for one, and how a cluster starts, shows and ends it."""
