"""`elastic-train doctor`: whether this machine can be a node of a job, and what to do about it if it cannot."""
