"""Doctors of one job on several nodes meet in etcd, and examine what lies between them, in both directions.

Each writes who it is. When all are there each writes the time, and the others note when they see it: half of the
difference of both ways is how far two clocks are apart. Then each asks all others, at their addresses, who they are,
and writes what it has seen. All is below <job>/doctor/ in etcd, on a lease that ends with the examination.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from elastic_train.health.result import Finding, fail, ok, warn
from elastic_train.system.wording import counted
from rendezvous.agent.identity import IdentityPort, ask
from rendezvous.membership.records import Keys
from rendezvous.membership.store import Put, Snapshot, Store
from rendezvous.torchelastic.addresses import interface_of, is_loopback, machine_name

LEASE_S, EXCHANGE_S = 10.0, 10.0
SKEW_S = 1.0
MOST_AT_ONCE = 16
ROUNDS = ("here", "now", "seen")
VERSIONS = ("elastic-train", "torch", "python")
_WHY = {
    "refused": "nothing listens there: another machine has the address, or a firewall refuses",
    "silent": "no answer: a firewall drops it, or no way leads there",
    "mute": "connected, but got no answer: a proxy, or a machine that hangs",
    "other": "somebody else answers there",
}


@dataclass(frozen=True, slots=True)
class Self:
    """This node's record of itself; `word` names the store that it sees, if that is known."""

    address: str
    versions: Mapping[str, str]
    word: Callable[[], str | None]
    clock: Callable[[], float] = time.time
    name: str = field(default_factory=lambda: f"{machine_name()}-{uuid.uuid4().hex[:6]}")


class Meeting:
    """One doctor's exchange with all others: their records, by round and name."""

    def __init__(self, store: Store, run_id: str, own: str, clock: Callable[[], float]) -> None:
        self.own, self.clock = own, clock
        self.said: dict[str, dict[str, dict[str, object]]] = {kind: {} for kind in ROUNDS}
        self.late_s: dict[str, float] = {}
        """Seconds, by this machine's clock, from each peer's timestamp until this node first saw it."""
        self._prefix = f"{Keys(run_id).prefix}doctor/"
        self._store, self._watch, self._lease = store, store.watch(self._prefix), store.lease(LEASE_S)

    def say(self, kind: str, what: Mapping[str, object]) -> None:
        self._store.swap({self._key(kind): Put(json.dumps(what), self._lease)}, {})

    def until(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Take what others say until something is so; say whether it is in time."""
        deadline, snapshot = time.monotonic() + timeout_s, self._watch.snapshot
        self._note(snapshot)
        while not is_so() and (left_s := deadline - time.monotonic()) > 0:
            snapshot = self._watch.wait(snapshot, left_s) or snapshot
            self._note(snapshot)
        return is_so()

    def others(self, number: int) -> list[str]:
        """Return the names of the first so many others that came."""
        return [name for name in self.said["here"] if name != self.own][:number]

    def host_of(self, name: str) -> str:
        return str(self.said["here"][name]["host"])

    def agent_of(self, name: str) -> str:
        return str(self.said["here"][name]["agent"])

    def close(self) -> None:
        """Leave: nobody is to meet this doctor any more, though what it has said may still be read."""
        self._store.swap({self._key("here"): None}, {})
        self._lease.abandon()
        self._watch.close()

    def _key(self, kind: str) -> str:
        return f"{self._prefix}{kind}/{self.own}"

    def _note(self, snapshot: Snapshot) -> None:
        now = self.clock()
        for key, entry in sorted(snapshot.entries.items(), key=lambda item: item[1].create_revision):
            kind, _, name = key.removeprefix(self._prefix).partition("/")
            if name in self.said.get(kind, {}) or kind not in self.said:
                continue
            self.said[kind][name] = dict(json.loads(entry.value))
            if kind == "now":
                self.late_s[name] = now - float(str(self.said[kind][name]["at"]))


def examine_peers(store: Store, run_id: str, own: Self, num_peers: int, wait_s: float) -> Iterator[Finding]:
    """Meet `num_peers` other doctors of the same job, and say what is between them and this node."""
    if is_loopback(own.address):
        yield fail("address", f"{own.address} is this machine's own, which no other reaches", "name one: --local-addr")
        return
    yield ok("address", f"others reach this node at {own.address} ({interface_of(own.address) or 'no interface'})")
    with (
        contextlib.closing(IdentityPort(own.address, own.name)) as port,
        contextlib.closing(Meeting(store, run_id, own.name, own.clock)) as meeting,
    ):
        here = {"host": socket.gethostname(), "agent": port.endpoint, "word": own.word(), **own.versions}
        meeting.say("here", here)
        meeting.until(lambda: len(meeting.others(num_peers)) == num_peers, wait_s)
        others = meeting.others(num_peers)
        if len(others) < num_peers:
            came = ", ".join(map(meeting.host_of, others)) or "nobody"
            found = f"{counted(num_peers, 'peer')} expected within {wait_s:.0f} s, and came: {came}"
            yield fail("peers", found, "start the same line on all nodes, with one --id and one --etcd")
            return
        yield ok("peers", f"met {', '.join(map(meeting.host_of, others))}")
        _exchange(meeting, others)
        for name in others:
            yield from _between(meeting, name, here)


def _exchange(meeting: Meeting, others: Sequence[str]) -> None:
    """Tell the others the time, and what this node sees of them, and hear the same from them."""
    meeting.say("now", {"at": meeting.clock()})
    meeting.until(lambda: set(others) <= meeting.said["now"].keys(), EXCHANGE_S)
    with ThreadPoolExecutor(min(MOST_AT_ONCE, len(others))) as pool:
        answers = dict(zip(others, pool.map(lambda name: ask(meeting.agent_of(name), name), others), strict=True))
    meeting.say("seen", {"answers": answers, "late_s": meeting.late_s})
    meeting.until(lambda: {meeting.own, *others} <= meeting.said["seen"].keys(), EXCHANGE_S)


def _between(meeting: Meeting, name: str, here: Mapping[str, object]) -> Iterator[Finding]:
    """Judge what is between this node and one other."""
    there, host = meeting.said["here"][name], meeting.host_of(name)
    yield _way(f"to {host}", meeting.agent_of(name), _seen_by(meeting, meeting.own, "answers").get(name))
    theirs = _seen_by(meeting, name, "answers").get(meeting.own)
    yield _way(f"from {host}", str(here["agent"]), theirs)
    yield _clocks(host, meeting.late_s.get(name), _seen_by(meeting, name, "late_s").get(meeting.own))
    if here["word"] is not None and there["word"] is not None:
        if here["word"] == there["word"]:
            yield ok("storage", f"{host} sees the same")
        else:
            yield fail("storage", f"{host} sees another", "mount one folder on all nodes, or use an object store")
    differing = [f"{key} {here[key]} here, {there.get(key)} there" for key in VERSIONS if here[key] != there.get(key)]
    if differing:
        yield warn("versions", f"{host} has others: {'; '.join(differing)}", "install the same on all nodes")


def _seen_by(meeting: Meeting, name: str, what: str) -> Mapping[str, object]:
    found = meeting.said["seen"].get(name, {}).get(what, {})
    assert isinstance(found, dict), "a doctor has written it"
    return found


def _way(direction: str, agent: str, answer: object) -> Finding:
    if answer == "itself":
        return ok("connection", f"{direction}, {agent}")
    why = _WHY.get(str(answer), "it did not say what it saw")
    return fail("connection", f"{direction}, {agent}: {why}", "open all ports between nodes, or name --local-addr")


def _clocks(host: str, late_s: object, their_late_s: object) -> Finding:
    if not isinstance(late_s, float) or not isinstance(their_late_s, float):
        return warn("clock", f"{host} did not say how late it is there", "try again")
    skew_s = (late_s - their_late_s) / 2
    said = f"{abs(skew_s):.2g} s {'ahead of' if skew_s > 0 else 'behind'} {host}'s"
    if abs(skew_s) > SKEW_S:
        return warn("clock", said, "set both by NTP: TLS, object stores and logs depend on it, leases do not")
    return ok("clock", said)
