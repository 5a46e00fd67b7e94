"""Connect a network namespace to this machine by one veth pair, so that its node can be disconnected for real.

Needs root and iproute2, and removes everything it created. etcd has a separate address, so a node can be cut off from
the other nodes but not from etcd.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from chaos.errors import ChaosError
from chaos.scenario.networks import Network
from chaos.services.network.packet_relay import Impairment, Relay
from rendezvous.process_table import is_alive, pids

_OUTSIDE = ("nodes", "etcd")
_BURST = "4mb"
"""Bytes that a limited interface sends at once; less than a scheduler's tick of them would lower the rate."""
_NOWHERE = "02:00:00:00:00:01"
_FIRST_TABLE = 1000
_MOST = 100_000
"""Cables are numbered by process id modulo this limit: interface names have room for five digits."""

_KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), 0.5).close()
except ConnectionRefusedError:
    pass
except OSError:
    sys.exit(1)
"""


class NoNamespacesError(ChaosError):
    """This process may not create network namespaces on this machine."""


@dataclass(frozen=True, slots=True)
class Cable:
    """A veth pair and its addresses, with a number that is unique on this machine.

    Packets between the nodes can be routed through the relay, if there is one, which drops or delays them; those of a
    network that is more than a limited rate always are.
    """

    number: int
    relay: Relay | None = None
    network: Network | None = None

    @property
    def namespace(self) -> str:
        return f"elastic-{self.number}"

    @property
    def outside(self) -> str:
        """Interface of the nodes outside."""
        return f"elastic-o{self.number}"

    @property
    def inside(self) -> str:
        """Interface of the node inside."""
        return f"elastic-i{self.number}"

    def address(self, whose: str) -> str:
        """Return the address of the outside `nodes`, of the node `inside`, or of `etcd`."""
        return f"10.213.{self.number % 250}.{('nodes', 'inside', 'etcd').index(whose) + 1}"

    def pull(self) -> None:
        """Disconnect the inside node from everything."""
        self._unroute()
        _ip("link", "set", self.outside, "down")

    def silence(self) -> None:
        """Drop packets from the inside node to other nodes; the reverse direction and etcd still work."""
        self._unroute()
        here = ("-n", self.namespace, "neigh", "replace", self.address("nodes"), "lladdr", _NOWHERE)
        _ip(*here, "dev", self.inside, "nud", "permanent")

    def part(self) -> None:
        """Drop packets between the inside node and other nodes in both directions; all nodes still reach etcd."""
        self.silence()
        _ip("rule", "add", *self._between(), "blackhole")

    def refuse(self) -> None:
        """Refuse connections from the inside node to other nodes, and drop packets from them; etcd still works.

        The other nodes' address also becomes a local one inside, as with docker's bridge, which has one address on all
        hosts.
        """
        self._unroute()
        _ip("-n", self.namespace, "addr", "add", f"{self.address('nodes')}/32", "dev", "lo")

    def worsen(self, *, loss: float = 0.0, delay_s: float = 0.0) -> None:
        """Drop or delay packets between the inside node and other nodes, but not to etcd."""
        usual = Impairment() if self.network is None else impairment_of(self.network)
        self._unroute()
        self.impair(replace(usual, loss=usual.loss + loss, delay_s=usual.delay_s + delay_s), ("nodes",))

    def impair(self, impairment: Impairment, whose: Sequence[str] = _OUTSIDE) -> None:
        """Impair the packets between the inside node and these addresses."""
        assert self.relay is not None, "the cable has no relay"
        self.relay.impairment = impairment
        outside, inside = self.relay.ends
        for each in whose:
            _ip("route", "replace", self.address("inside"), "dev", outside, "table", self._table(each))
            _ip("-n", self.namespace, "route", "replace", self.address(each), "dev", inside)

    def misname(self) -> None:
        """Map this machine's name to a loopback address in the inside hosts file, as Debian's installer does."""
        self._hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")

    @property
    def is_misnamed(self) -> bool:
        """True if the hosts file inside differs from this machine's."""
        return self._hosts.read_text() != Path("/etc/hosts").read_text()

    def name_as_outside(self) -> None:
        """Give the inside node this machine's hosts file."""
        self._hosts.parent.mkdir(parents=True, exist_ok=True)
        self._hosts.write_text(Path("/etc/hosts").read_text())

    def mend(self) -> None:
        """Undo all changes to links and packets, but those that its network makes."""
        _ip("link", "set", self.outside, "up")
        for undo in (
            ("-n", self.namespace, "neigh", "del", self.address("nodes"), "dev", self.inside),
            ("rule", "del", *self._between(), "blackhole"),
            ("-n", self.namespace, "addr", "del", f"{self.address('nodes')}/32", "dev", "lo"),
        ):
            subprocess.run(["ip", *undo], capture_output=True, check=False)  # may not exist
        self._unroute()
        if self.network is not None and self.network.is_far:
            self.impair(impairment_of(self.network))

    def limit(self) -> None:
        """Limit both ends to the rate of a network in one rack."""
        assert self.network is not None, "only called with a network"
        rate = ("root", "tbf", "rate", f"{8 * self.network.bytes_per_s:.0f}bit", "burst", _BURST, "latency", "10ms")
        _run("tc", "qdisc", "replace", "dev", self.outside, *rate)
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", self.inside, *rate)

    def _unroute(self) -> None:
        """Let packets take the veth pair again."""
        for undo in (
            *(("route", "flush", "table", self._table(whose)) for whose in _OUTSIDE),
            *(("-n", self.namespace, "route", "del", self.address(whose)) for whose in _OUTSIDE),
        ):
            subprocess.run(["ip", *undo], capture_output=True, check=False)  # may not exist
        if self.relay is not None:
            self.relay.impairment = Impairment()

    def command(self, command: list[str]) -> list[str]:
        """Return `command` wrapped to run inside the namespace."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def answers_inside(self, whose: str) -> bool:
        """Return True if an address answers the inside node, even if only by refusing a connection."""
        probe = self.command([sys.executable, "-I", "-S", "-c", _KNOCK, self.address(whose)])
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0

    @property
    def _hosts(self) -> Path:
        """The hosts file inside; iproute2 mounts it as /etc/hosts."""
        return Path("/etc/netns") / self.namespace / "hosts"

    def _table(self, whose: str) -> str:
        """Routing table of an outside address for the route through the relay."""
        return str(_FIRST_TABLE + _MOST * _OUTSIDE.index(whose) + self.number)

    def _between(self, whose: str = "nodes") -> tuple[str, ...]:
        return ("from", self.address(whose), "to", self.address("inside"))


def impairment_of(network: Network) -> Impairment:
    """Return what the relay does to packets of a network."""
    least_s, most_s = network.round_trip_s or (0.0, 0.0)
    return Impairment(network.loss, least_s / 2, (most_s - least_s) / 2, network.bytes_per_s)


@contextlib.contextmanager
def cable(network: Network | None = None) -> Iterator[Cable]:
    """Create a cable to a new namespace, with a relay if TUN devices are available, and make it one of a network.

    Raises NoNamespacesError if that is not possible here.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise NoNamespacesError("network namespaces need root and iproute2")
    number = os.getpid() % _MOST
    _take_away_left()
    laid = Cable(number, _relay(number), network)
    try:
        try:
            _lay(laid)
            _give_network(laid)
        except subprocess.CalledProcessError as error:
            raise NoNamespacesError(f"no network namespaces here: {error.stderr.decode().strip()}") from error
        yield laid
    finally:
        if laid.relay is not None:
            laid.relay.close()
        _take_away(laid)


def _relay(number: int) -> Relay | None:
    relay = Relay((f"elastic-p{number}", f"elastic-q{number}"))
    try:
        relay.start()
    except OSError:
        return None
    return relay


def _take_away_left() -> None:
    """Remove cables left by killed processes, as their addresses may be reused."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    names = [line.partition(" ")[0] for line in listed.splitlines()]
    numbers = {int(name.removeprefix("elastic-")) for name in names if re.fullmatch(r"elastic-\d+", name)}
    alive = {pid % _MOST for pid in pids() if is_alive(pid)}
    for number in (numbers - alive) | {os.getpid() % _MOST}:
        _take_away(Cable(number))


def _take_away(laid: Cable) -> None:
    for undo in (
        ("rule", "del", *laid._between(), "blackhole"),
        *(("rule", "del", *laid._between(whose), "lookup", laid._table(whose)) for whose in _OUTSIDE),
        ("link", "del", laid.outside),
        ("netns", "del", laid.namespace),
    ):
        subprocess.run(["ip", *undo], capture_output=True, check=False)
    shutil.rmtree(laid._hosts.parent, ignore_errors=True)


def _lay(laid: Cable) -> None:
    name = laid.namespace
    _ip("netns", "add", name)
    laid.name_as_outside()
    _ip("link", "add", laid.outside, "type", "veth", "peer", "name", laid.inside)
    _ip("link", "set", laid.inside, "netns", name)
    for whose in ("nodes", "etcd"):
        _ip("addr", "add", f"{laid.address(whose)}/24", "dev", laid.outside)
    _ip("link", "set", laid.outside, "up")
    _ip("-n", name, "addr", "add", f"{laid.address('inside')}/24", "dev", laid.inside)
    _ip("-n", name, "link", "set", laid.inside, "up")
    _ip("-n", name, "link", "set", "lo", "up")
    if laid.relay is not None:
        outside, inside = laid.relay.ends
        _ip("link", "set", inside, "netns", name)
        _ip("link", "set", outside, "up")
        _ip("-n", name, "link", "set", inside, "up")
        for whose in _OUTSIDE:
            _ip("rule", "add", *laid._between(whose), "lookup", laid._table(whose))  # its table is empty until `impair`


def _give_network(laid: Cable) -> None:
    if laid.network is None:
        return
    if not laid.network.is_far:
        laid.limit()
    elif laid.relay is None:
        raise NoNamespacesError("no TUN interfaces can be made here, so no packets can be late or lost")
    laid.mend()


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
