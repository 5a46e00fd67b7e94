"""A network namespace with one cable to the rest of this machine: nodes that can really be cut off.

Needs root and iproute2, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from chaos.node import Node, clean_environ

NAMESPACE, OUTSIDE, INSIDE = "elastic-cut", "elastic-out", "elastic-in"
ADDRESSES = ("10.213.77.1", "10.213.77.2")
ETCD_ADDRESS = "10.213.77.3"
_ROUTE, _AWAY = ("ip", "-n", NAMESPACE, "route"), ("blackhole", f"{ADDRESSES[0]}/32")


class NoNamespacesError(Exception):
    """This machine does not let this process make network namespaces."""


class CableNode(Node):
    """A node in the namespace, whose freeze is a cut: of the cable, or, every other time, of the way to other nodes.

    The namespace's etcd has an address of its own, so in the second case the node reaches etcd and nobody else.
    """

    kinds: tuple[str, ...] = ("cut", "split")
    num_cuts = 0

    def freeze(self) -> list[int]:
        if self.kinds[self.num_cuts % len(self.kinds)] == "cut":
            _ip("link", "set", OUTSIDE, "down")
        else:
            subprocess.run([*_ROUTE, "add", *_AWAY], capture_output=True, check=True)
        self.num_cuts += 1
        return self.pids()

    def thaw(self, pids: list[int]) -> None:
        _ip("link", "set", OUTSIDE, "up")
        subprocess.run([*_ROUTE, "del", *_AWAY], capture_output=True, check=False)  # there may be none

    def start(self) -> list[int]:
        self.thaw([])
        return super().start()


class CutNode(CableNode):
    kinds = ("cut",)


class SplitNode(CableNode):
    kinds = ("split",)


@contextlib.contextmanager
def namespace() -> Iterator[None]:
    """Make a namespace with a cable to this one; raise NoNamespacesError where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise NoNamespacesError("network namespaces need root and iproute2")
    _take_away()  # what a killed process has left
    try:
        try:
            _lay_cable()
        except subprocess.CalledProcessError as error:
            raise NoNamespacesError(f"no network namespaces here: {error.stderr.decode().strip()}") from error
        yield
    finally:
        _take_away()


def _take_away() -> None:
    subprocess.run(["ip", "link", "del", OUTSIDE], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", NAMESPACE], capture_output=True, check=False)


def _lay_cable() -> None:
    _ip("netns", "add", NAMESPACE)
    _ip("link", "add", OUTSIDE, "type", "veth", "peer", "name", INSIDE)
    _ip("link", "set", INSIDE, "netns", NAMESPACE)
    for address in (ADDRESSES[0], ETCD_ADDRESS):
        _ip("addr", "add", f"{address}/24", "dev", OUTSIDE)
    _ip("link", "set", OUTSIDE, "up")
    _ip("-n", NAMESPACE, "addr", "add", f"{ADDRESSES[1]}/24", "dev", INSIDE)
    _ip("-n", NAMESPACE, "link", "set", INSIDE, "up")
    _ip("-n", NAMESPACE, "link", "set", "lo", "up")


def behind_the_cable(kind: type[CableNode], nodes: list[Node], folder: Path) -> list[Node]:
    """Put the last node into the namespace; all use the cable."""
    environ = {**clean_environ(os.environ), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    *outside, inside = nodes
    at = inside.command.index("torch.distributed.run") + 1
    placed = [
        Node(
            node.number,
            [*node.command[:at], f"--local-addr={ADDRESSES[0]}", *node.command[at:]],
            folder / f"node-{node.number}.log",
            {**environ, "GLOO_SOCKET_IFNAME": OUTSIDE},
        )
        for node in outside
    ]
    command = ["ip", "netns", "exec", NAMESPACE, *inside.command]
    log = folder / f"node-{inside.number}.log"
    return [*placed, kind(inside.number, command, log, {**environ, "GLOO_SOCKET_IFNAME": INSIDE})]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
