"""Commands for clusters: examine a node, and start, show and end a job."""
