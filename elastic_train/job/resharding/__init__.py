"""Resharding in a new world: gather the ranks' states, settle a pending step, and assign shards."""
