"""A real Slurm on this machine: Debian's programs on machines that are namespaces."""
