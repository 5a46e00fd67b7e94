"""The address and the name of this machine, as other nodes use them."""

from __future__ import annotations

import socket
from pathlib import Path

from rendezvous.etcd.options import EtcdOptions
from rendezvous.membership.probes import split_endpoint


def address_towards(options: EtcdOptions) -> str:
    """Return the address of this node on the network that leads to etcd; no packet is sent."""
    host, port = split_endpoint(options.endpoints[0])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host.strip("[]"), port))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.getfqdn()


def machine_name() -> str:
    """Return a name that two containers or machines do not share."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    suffix = boot.read_text().strip()[:8] if boot.exists() else ""
    return f"{socket.gethostname()}-{suffix}"
