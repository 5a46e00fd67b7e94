"""The training job: the plan, the applied state, the sample streams, and the contents of a commit."""
