"""A real Slurm on this machine: machines that are namespaces, and the cluster that Debian's programs make of them."""
