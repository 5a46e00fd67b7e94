"""Run the product in one process and in virtual time: its own code over a simulated clock, etcd, storage and
network."""
