"""The meeting point of a world's ranks: a stand-in for TCPStore, and the port that identifies a node's agent."""

from __future__ import annotations

from datetime import timedelta

from chaos.sim.machine.collectives import Hub
from chaos.sim.machine.kernel import Process
from chaos.sim.machine.network import Net
from chaos.sim.machine.stdlib import host_of
from rendezvous.meeting_point import CALL_TIMEOUT_S

RETRY_S = 0.5
"""Seconds after which a client retries a store that does not answer."""
FROZEN_S = 0.5
"""Seconds between checks whether the frozen host of a world runs again."""


class MeetingStore:
    """Stand-in for a TCPStore, which dies with its process."""

    node = ""

    def __init__(self, net: Net, address: str, port: int, *, is_master: bool, **options: object) -> None:
        self.net = net
        if is_master:
            self.process: Process = net.kernel.process
            self.port = net.listen(self)
            self.hub = Hub(net)
            return
        net.connect(address, port)
        hosted = net.ports[port]
        assert isinstance(hosted, MeetingStore), "nothing else listens"
        until = net.kernel.now + CALL_TIMEOUT_S
        while hosted.process.is_paused and net.kernel.now < until:
            net.kernel.sleep(FROZEN_S)  # the frozen process's machine has accepted the connection
        if not hosted.process.is_running:
            raise TimeoutError(f"{address}:{port} does not answer")
        self.process, self.port, self.hub = hosted.process, port, hosted.hub


def agent_port(net: Net, node: str) -> str:
    """Open the port at which an agent identifies its node; called by the agent."""
    store = MeetingStore(net, "", 0, is_master=True)
    store.node = node
    return f"{host_of(net.kernel.process.node)}:{store.port}"


def agent_store(
    net: Net, address: str, port: int, _: object, is_master: bool, timeout: timedelta, **__: object
) -> object:
    """Stand in for a TCPStore client, which retries until its host answers; raise RuntimeError after `timeout`."""
    until = net.kernel.now + timeout.total_seconds()
    while True:
        try:
            return MeetingStore(net, address, port, is_master=is_master)
        except OSError as error:
            if net.kernel.now >= until:
                raise RuntimeError(str(error)) from error
            net.kernel.sleep(RETRY_S)
