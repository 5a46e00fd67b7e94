"""Etcd with faults: one store for all, and per process a client whose calls take time and may fail.

Keys, revisions, guards and leases are those of `rendezvous.membership.memory_store`, which passes the same contract
tests as the real client. Added are the faults between process and etcd: delays, one-way and two-way cuts, outages,
refusals, answers lost after the write has happened, watches that lag or fall silent, leases that expire unrenewed, and
leases that etcd ends too early.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeVar

from chaos.sim.machine.kernel import Kernel, Process
from chaos.sim.machine.stdlib import Condition
from rendezvous.errors import StoreBlockedError, StoreDeniedError, StoreRefusedError, StoreUnavailableError
from rendezvous.etcd.connection import CALL_TIMEOUT_S, GIVE_UP_AFTER_S
from rendezvous.etcd.data_loss import DataLossDetector
from rendezvous.etcd.store import EtcdStore
from rendezvous.etcd.watch import RELIST_S
from rendezvous.membership.memory_store import MemoryLease, MemoryStore
from rendezvous.membership.store import (
    Guards,
    Lease,
    Put,
    Snapshot,
    Writes,
)

T = TypeVar("T")

RETRY_S = (0.05, 0.5)
BROKEN_S = 0.2
"""Seconds between attempts to reconnect a watch whose stream is cut."""
LEAST_TTL_S = 2.0
SLOWNESS = 100.0
NUM_MEMBERS = 3

Call = Literal["read", "renewal", "write", "delete"]
Refusal = Literal["nospace", "corrupt", "auth"]
REFUSALS: tuple[Refusal, ...] = ("nospace", "corrupt", "auth")
"""Reasons for refusals: two alarms, under which etcd still reads and renews, and a rejected user."""


class Etcd:
    """The servers: data, availability, and links that are cut."""

    def __init__(self, kernel: Kernel, draws: random.Random, delay_s: float, piece_s: float = 0.0) -> None:
        self.kernel, self.draws, self.delay_s, self.piece_s = kernel, draws, delay_s, piece_s
        self.core = MemoryStore()
        self.down_until = self.slow_until = 0.0
        self.lost_member, self.lost_until = 0, 0.0
        self._refusal: Refusal = "nospace"
        self._refuses_until = 0.0
        self.deaf: set[int] = set()
        """Nodes whose requests do not arrive."""
        self.mute: set[int] = set()
        """Nodes that get no answers, and hear nothing from their watches."""
        self.leases: list[SimLease] = []
        self.watches: dict[SimWatch, None] = {}
        self.idle: dict[SimWatch, None] = {}
        """Watches that are up to date."""
        self._shown: dict[tuple[str, str], Snapshot] = {}

    @property
    def is_down(self) -> bool:
        return self.kernel.now < self.down_until

    def delay(self) -> float:
        return self.draws.expovariate(1 / self.delay_s) * (SLOWNESS if self.kernel.now < self.slow_until else 1.0)

    def show(self, prefix: str, end: str = "") -> Snapshot:
        """Return the keys below a prefix that sort before `end`, as they are now; equal states are one object."""
        shown = self._shown.get((prefix, end))
        if shown is None or shown.revision != self.core.revision:
            self._shown[prefix, end] = shown = self.core.get(prefix).before(end)
        return shown

    def notify(self) -> None:
        """Schedule an update of every watch, each after its own delay."""
        for watch in list(self.idle):
            watch.expect()

    def outage(self, seconds: float) -> None:
        """Be unavailable; leases survive, as etcd renews them all when it is back."""
        self.down_until = max(self.down_until, self.kernel.now + seconds)
        for lease in self.leases:
            lease.ends_at = max(lease.ends_at, self.down_until + lease.ttl_s)

    def refuse(self, refusal: Refusal, seconds: float) -> None:
        """Answer but refuse; open watch streams continue."""
        self._refusal, self._refuses_until = refusal, self.kernel.now + seconds

    def refusal_of(self, call: Call) -> StoreUnavailableError | None:
        """Return why a call is refused now; etcd without space still deletes."""
        refused = self._refusal
        if self.kernel.now >= self._refuses_until or (call in ("read", "renewal") and refused != "auth"):
            return None
        if refused == "auth":
            return StoreDeniedError("etcd refused the user")
        return None if call == "delete" and refused == "nospace" else StoreBlockedError(f"the alarm {refused}")

    def lose_member(self, member: int, seconds: float) -> None:
        """Lose a member: its clients' pending calls may have been executed, and their watches fall silent."""
        self.lost_member, self.lost_until = member, self.kernel.now + seconds
        for watch in self.watches:
            if self.is_lost_to(watch.process):
                watch.fall_silent(seconds)

    def is_lost_to(self, process: Process) -> bool:
        return self.kernel.now < self.lost_until and process.pid % NUM_MEMBERS == self.lost_member

    def forget(self) -> None:
        """Lose all data: revisions restart at 1, and no lease is known."""
        self.core, self._shown = MemoryStore(), {}
        for lease in self.leases:
            lease.core.is_lost = True
        self.leases.clear()
        self.notify()

    def end(self, lease: SimLease) -> None:
        if lease in self.leases:
            self.leases.remove(lease)
            self.core.end(lease.core)
            self.notify()


class EtcdClient:
    """One process's `rendezvous.membership.store.Store`; the retry rules are those of
    `rendezvous.etcd.store.EtcdStore`.
    """

    def __init__(self, etcd: Etcd, process: Process, give_up_after_s: float = GIVE_UP_AFTER_S) -> None:
        self._etcd, self._process, self._give_up_after_s = etcd, process, give_up_after_s
        self._data_loss, self._is_closed = DataLossDetector(), False

    def get(self, prefix: str, end: str = "") -> Snapshot:
        asked = self._data_loss.ask()
        found = self._call(lambda: self._etcd.show(prefix, end), self._give_up_after_s)
        return _in_life(found, self._data_loss.heard(asked, found.revision))

    def swap(self, writes: Writes, guards: Guards) -> int | None:
        tries, etcd = 0, self._etcd
        unwrapped = {key: None if put is None else Put(put.value, _core_of(put.lease)) for key, put in writes.items()}

        def transact() -> int | None:
            nonlocal tries
            tries += 1
            if any(put is not None and put.lease is not None and put.lease.is_lost for put in unwrapped.values()):
                raise StoreRefusedError("requested lease not found")
            revision = etcd.core.swap(unwrapped, guards)
            if revision is not None:
                etcd.notify()
            return revision

        asked = self._data_loss.ask()
        is_deletion = not guards and set(writes.values()) == {None}
        revision = self._call(transact, self._give_up_after_s, "delete" if is_deletion else "write")
        if revision is not None:
            self._data_loss.heard(asked, revision)
        if revision is None and tries > 1:
            return EtcdStore._written_before(self, writes)  # type: ignore[arg-type]  # the same rule over the same calls
        return revision

    def lease(self, ttl_s: float, *, renew: bool = True) -> SimLease:
        return self._call(
            lambda: SimLease(self._etcd, self._process, max(LEAST_TTL_S, math.ceil(ttl_s)), renew),
            self._give_up_after_s,
            "write",
        )

    def watch(self, prefix: str, end: str = "") -> SimWatch:
        return SimWatch(self._etcd, self._process, (prefix, end), self.get(prefix, end), self._data_loss)

    def close(self) -> None:
        self._is_closed = True

    def _call(self, ask: Callable[[], T], give_up_after_s: float, kind: Call = "read") -> T:
        """Call, and retry after failures; the answer to an executed call may be lost."""
        etcd, kernel, node = self._etcd, self._etcd.kernel, self._process.node
        started = kernel.now
        while True:
            if self._is_closed:
                raise StoreUnavailableError("the connection to etcd is closed")
            asked_at = kernel.now
            kernel.sleep(etcd.delay())
            is_refused = etcd.is_down or (etcd.is_lost_to(self._process) and etcd.draws.random() < 0.5)
            refusal = None
            if not is_refused and node not in etcd.deaf:
                refusal = etcd.refusal_of(kind)
                if isinstance(refusal, StoreDeniedError):
                    raise refusal
                is_refused = refusal is not None
            if not is_refused and node not in etcd.deaf:
                answer = ask()
                kernel.sleep(etcd.delay())
                is_refused = etcd.is_down or (etcd.is_lost_to(self._process) and etcd.draws.random() < 0.5)
                if not is_refused and node not in etcd.mute and kernel.now - asked_at < CALL_TIMEOUT_S:
                    return answer
            left_s = max(0.0, CALL_TIMEOUT_S - (kernel.now - asked_at))
            kernel.sleep(etcd.draws.uniform(*RETRY_S) if is_refused else left_s)
            if kernel.now - started >= give_up_after_s:
                raise refusal or StoreUnavailableError(f"no etcd answers (tried for {give_up_after_s:.0f} s)")


class SimLease:
    """A lease that is renewed while its process runs and reaches etcd, as the real one."""

    def __init__(self, etcd: Etcd, process: Process, ttl_s: float, renew: bool) -> None:
        self.ttl_s, self.is_lost = ttl_s, False
        self.core: MemoryLease = etcd.core.lease(ttl_s)
        self.process = process
        self.ends_at = etcd.kernel.now + ttl_s
        self._etcd, self._is_renewed = etcd, renew
        etcd.leases.append(self)
        etcd.kernel.at(self.ends_at, self._look)
        if renew:
            etcd.kernel.after(ttl_s / 3, self._renew)

    def revoke(self) -> None:
        self._is_renewed = False
        if self.is_lost:
            return
        client = EtcdClient(self._etcd, self.process)
        client._call(lambda: self._etcd.end(self), CALL_TIMEOUT_S, "delete")
        self.is_lost = True

    def abandon(self) -> None:
        self._is_renewed = False

    def _renew(self) -> None:
        etcd, process = self._etcd, self.process
        if not self._is_renewed or process.is_dead or self.is_lost:
            return
        if process.is_paused:
            process.at_resume.append(self._renew)
            return
        wait_s = self.ttl_s / 12
        if not etcd.is_down and process.node not in etcd.deaf and etcd.refusal_of("renewal") is None:
            if self.core.is_lost:
                if process.node not in etcd.mute:
                    self.is_lost = True
                    return
            else:
                self.ends_at = etcd.kernel.now + self.ttl_s
                wait_s = self.ttl_s / 3
        etcd.kernel.after(wait_s, self._renew)

    def _look(self) -> None:
        """End the lease if its time to live is over and it has not been renewed."""
        etcd = self._etcd
        if self.core.is_lost:
            return
        if etcd.kernel.now >= self.ends_at and not etcd.is_down:
            etcd.end(self)
        else:
            etcd.kernel.at(max(self.ends_at, etcd.down_until), self._look)


class SimWatch:
    """A mirror that receives changes late, and none while its stream is broken."""

    def __init__(
        self, etcd: Etcd, process: Process, covered: tuple[str, str], first: Snapshot, data_loss: DataLossDetector
    ) -> None:
        self.snapshot, self._data_loss = first, data_loss
        self.process = process
        self.silent_until = self._next_piece_at = 0.0
        self._etcd, self._covered = etcd, covered
        self._changed = Condition(etcd.kernel)
        self._is_expecting = False
        etcd.watches[self] = etcd.idle[self] = None
        process.at_death["watch"] = self.close
        self.expect()

    def wait(self, seen: Snapshot, timeout_s: float) -> Snapshot | None:
        with self._changed:
            arrived = self._changed.wait_for(lambda: self.snapshot.is_newer(seen), timeout_s)
            return self.snapshot if arrived else None

    def cover(self, end: str) -> None:
        if end != self._covered[1]:
            self._covered = self._covered[0], end
            self.expect()

    def close(self) -> None:
        self._etcd.watches.pop(self, None)
        self._etcd.idle.pop(self, None)

    def fall_silent(self, seconds: float = RELIST_S) -> None:
        """Break the stream silently; the next relist, after `RELIST_S`, finds what was missed."""
        self.silent_until = self._etcd.kernel.now + seconds
        self.expect()

    def expect(self) -> None:
        if not self._is_expecting:
            self._is_expecting = True
            self._etcd.idle.pop(self, None)
            kernel = self._etcd.kernel
            kernel.at(max(kernel.now + self._etcd.delay(), self._next_piece_at), self._hear)

    def _hear(self) -> None:
        etcd, kernel, process = self._etcd, self._etcd.kernel, self.process
        if process.is_dead:
            return
        if process.is_paused:
            process.at_resume.append(lambda: kernel.after(etcd.delay(), self._hear))
        elif kernel.now < self.silent_until:
            kernel.at(self.silent_until, self._hear)
        elif etcd.is_down:
            kernel.at(etcd.down_until + etcd.delay(), self._hear)
        elif process.node in etcd.mute or process.node in etcd.deaf:
            kernel.after(BROKEN_S, self._hear)
        else:
            self._is_expecting = False
            if self in etcd.watches:
                etcd.idle[self] = None
            found = etcd.show(*self._covered)
            fresh = _in_life(found, self._data_loss.heard(self._data_loss.ask(), found.revision))
            shown = self.snapshot
            is_same = fresh == replace(shown, revision=fresh.revision)  # what changed is not covered
            if fresh.is_newer(shown) and not is_same:
                self.snapshot = fresh
                self._next_piece_at = kernel.now + etcd.piece_s
                self._changed.notify_all()
                if process.listening is not None:
                    kernel.wake(process.listening)  # after the thread that follows the watch


def _in_life(snapshot: Snapshot, life: int) -> Snapshot:
    """Return a snapshot with this `life`; the same object if unchanged, since results derived from it are cached."""
    return snapshot if snapshot.life == life else replace(snapshot, life=life)


def _core_of(lease: Lease | None) -> MemoryLease | None:
    assert lease is None or isinstance(lease, SimLease), "a key of the simulated etcd hangs on a simulated lease"
    return None if lease is None else lease.core
