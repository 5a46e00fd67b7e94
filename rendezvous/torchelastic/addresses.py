"""Where this machine is, and whether a process on another one still listens."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from rendezvous.etcd.options import EtcdOptions, split_endpoint

PROBE_TIMEOUT_S = 0.2
REACH_TIMEOUT_S = 1.0


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


def is_refused(endpoint: str) -> bool:
    """Say whether host:port refuses a connection: nobody listens there any more.

    A machine that is gone, or cut off, does not refuse: that is not known here, and is what leases are for.
    """
    with contextlib.suppress(OSError, ValueError):
        try:
            socket.create_connection(split_endpoint(endpoint), timeout=PROBE_TIMEOUT_S).close()
        except ConnectionRefusedError:
            return True
    return False


def is_reachable(endpoint: str) -> bool:
    """Say whether the machine of host:port answers, if only by a refusal."""
    try:
        socket.create_connection(split_endpoint(endpoint), timeout=REACH_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
    return True
