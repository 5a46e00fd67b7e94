"""`elastic-train submit`: a job of a cluster, rendered from the artifacts of `deploy/` and handed to its scheduler."""
