"""What is trained: the plan, the applied state, the sample streams, and what a commit records of them."""
