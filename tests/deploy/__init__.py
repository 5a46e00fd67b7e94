"""Tests with real schedulers, such as a Slurm cluster in namespaces; run by `make test-deploy`."""
