"""Nodes at the end of a cable, whose freeze is a cut: of the cable, or of the way to the other nodes alone."""

from __future__ import annotations

import os
from pathlib import Path

from chaos.network import Cable
from chaos.node import Node, clean_environ


class CableNode(Node):
    """A node in the cable's namespace, whose freeze is a cut: of all, or, every other time, of the way to other nodes.

    The namespace's etcd has an address of its own, so in the second case the node reaches etcd and nobody else.
    """

    kinds: tuple[str, ...] = ("cut", "split")
    num_cuts = 0
    laid: Cable

    def freeze(self) -> list[int]:
        if self.kinds[self.num_cuts % len(self.kinds)] == "cut":
            self.laid.pull()
        else:
            self.laid.part()
        self.num_cuts += 1
        return self.pids()

    def thaw(self, pids: list[int]) -> None:
        super().thaw(pids)  # a worker of this node may have been stopped, too
        self.laid.mend()

    def start(self) -> list[int]:
        self.thaw([])
        return super().start()


class CutNode(CableNode):
    kinds = ("cut",)


class SplitNode(CableNode):
    kinds = ("split",)


def behind_the_cable(kind: type[CableNode], laid: Cable, nodes: list[Node], folder: Path) -> list[Node]:
    """Put the last node into the namespace; all use the cable."""
    environ = {**clean_environ(os.environ), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    *outside, inside = nodes
    at = inside.command.index("torch.distributed.run") + 1
    placed = [
        Node(
            node.number,
            [*node.command[:at], f"--local-addr={laid.address('nodes')}", *node.command[at:]],
            folder / f"node-{node.number}.log",
            {**environ, "GLOO_SOCKET_IFNAME": laid.outside},
        )
        for node in outside
    ]
    log = folder / f"node-{inside.number}.log"
    last = kind(inside.number, laid.command(inside.command), log, {**environ, "GLOO_SOCKET_IFNAME": laid.inside})
    last.laid = laid
    return [*placed, last]
