"""What runs jobs for users, for real: a Slurm cluster in namespaces. `make test-deploy` runs these."""
