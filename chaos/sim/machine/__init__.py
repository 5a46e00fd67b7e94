"""The simulated machine: kernel, clock, network, etcd, object store, process groups."""
