"""Tests with real schedulers, such as a Slurm cluster in namespaces; run by `make test-deploy`."""

TOOLS = ("buildah", "podman", "runc", "mmdebstrap")
PACKAGES = " ".join((*TOOLS, "catatonit"))
"""Debian's packages for building and starting containers, installed with --no-install-recommends."""
