"""`python -m tests.network_program NAMESPACE HOSTS MODULE ARGS…`: `python -m MODULE ARGS…` as if on its own machine.

The program gets the network of a namespace (this machine's for `-`) and HOSTS as /etc/hosts, as with `ip netns exec`
and `unshare`, but for forked processes.
"""

import ctypes
import os
import runpy
import sys
from pathlib import Path

NEW_NETWORK, NEW_MOUNTS = 0x40000000, 0x00020000
BIND, RECURSIVE, SLAVE = 0x1000, 0x4000, 0x80000
_libc = ctypes.CDLL(None, use_errno=True)


def enter(namespace: str, hosts: str) -> None:
    """Leave the launching process's network and mounts; raise OSError if the kernel refuses."""
    if namespace != "-":
        with Path("/run/netns", namespace).open() as network:
            _check(_libc.setns(network.fileno(), NEW_NETWORK))
    _check(_libc.unshare(NEW_MOUNTS))
    _check(_libc.mount(None, b"/", None, RECURSIVE | SLAVE, None))
    _check(_libc.mount(os.fsencode(hosts), b"/etc/hosts", None, BIND, None))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    _, namespace, hosts, module, *arguments = sys.argv
    enter(namespace, hosts)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
