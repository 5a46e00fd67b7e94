"""The source of worlds: one from the launcher, or one after another from live membership.

In `restart` mode, and without launcher, a process trains in one world, and a fault ends the process; the launcher
starts another. In `live` mode the process outlives its worlds: it asks for the next one after a fault, or to let others
in.

A process gives up after too many consecutive worlds in which it applied no step, including those that did not form: it
counts for itself, because a world that does not form leaves no history. Networks recover, so the count must also last
for some time. A step that is lost again with the only holders of a part of the state does not count: worlds that keep
restarting from one commit must get beyond all earlier ones, or to a new commit. Faults that kill processes are counted
from the histories (`training.open_session`), as far as one folder has them.
"""

from __future__ import annotations

import datetime
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from elastic_train.config.schema import Config
from elastic_train.core.lineage import place_of
from elastic_train.errors import ConfigError, NoProgressError, PeerLostError, Preempted, StorageError, translated
from elastic_train.parallel.devices.device import device_of
from elastic_train.parallel.group import Group, connect
from elastic_train.system.watchdog import Watchdog
from elastic_train.system.wording import counted
from elastic_train.tracking.history import UnformedWorlds
from elastic_train.world import one_store
from rendezvous.context import LiveContext, RendezvousContext, context, live_context
from rendezvous.errors import StoreUnavailableError
from rendezvous.live_member import LiveMember, LiveWorld
from rendezvous.membership.participant import CLOSED_S
from rendezvous.membership.records import Closed, Job
from rendezvous.membership.rules.cells import CellShape
from rendezvous.outage_log import OutageLog

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 5.0
"""Seconds a member waits after a world that did not form, doubled after each further one."""
ETCD_PAUSE_S = 0.5
DOMAIN = "ELASTIC_TRAIN_DOMAIN"
"""Environment variable that names a node's failure domain, e.g. its rack."""
log = logging.getLogger(__name__)


class Standstill:
    """Counts worlds without a step; `reached` returns this process's last applied step."""

    def __init__(self, most: int | None, least_s: float, reached: Callable[[], int]) -> None:
        self._most, self._least_s, self._reached = most, least_s, reached
        self._furthest, self._committed, self._num, self._since_s = reached(), 0, 0, 0.0

    def note(self, why: str, committed: int = 0) -> None:
        """Count a world that has ended, or has not formed; progress resets the count.

        Progress means more than ever before, in steps or in the step of the newest commit, `committed`. Raises
        NoProgressError after `most` worlds in a row if `least_s` seconds have passed since the first.
        """
        step, now = self._reached(), time.monotonic()
        if step > self._furthest or committed > self._committed:
            self._furthest, self._committed = max(step, self._furthest), max(committed, self._committed)
            self._num = 0
            return
        if self._num == 0:
            self._since_s = now
        self._num += 1
        lasted_s = now - self._since_s
        if self._most is None or self._num < self._most or lasted_s < self._least_s:
            return
        raise NoProgressError(
            f"{self._num} worlds in a row, for {lasted_s:.0f} s, did not get beyond step {self._furthest}; "
            f"the last one: {why}. "
            "Check that every node reaches the others on all ports, and the nodes' logs for what ended their "
            "processes; give_up_after sets how long to try"
        )


@dataclass(frozen=True, slots=True)
class Formed:
    """A group that has formed, and its membership's context; None without our rendezvous."""

    group: Group
    launched: RendezvousContext | None


class Worlds(Protocol):
    """The worlds that a process trains in."""

    @property
    def is_live(self) -> bool:
        """True if another world may follow in this process."""

    @property
    def is_launched(self) -> bool:
        """True if a launcher may start another process in this one's place."""

    def form(self, *, as_last: bool = False) -> Formed | None:
        """Leave the last world and wait for the next; return None if there is none because the job is done.

        With `as_last`, the process takes the last rank, so that it does not lead unless it is alone.

        Raises TooFewNodesError if not enough nodes come in time, Preempted if asked to leave, NoProgressError if too
        many consecutive worlds had no step, and ConfigError if another job has just finished under the same run id.
        """

    def note_state(self, *, is_there: bool) -> None:
        """Note that this process has the state of its rank in the world that has formed, or has dropped what it had."""

    def wants_to_grow(self) -> bool:
        """Return True if the world should end at the next step boundary to let others in."""

    def published(self) -> str | None:
        """Return the head commit that etcd last named; None if it named none."""

    def drop(self, rank: int) -> str:
        """Ask the node of a rank to leave, if the others can do without it; return the outcome as text."""

    def leave(self, *, is_job_done: bool) -> None:
        """Leave the membership at once; a finished job accepts no more members."""


class OneWorld:
    """The world that the launcher's environment describes."""

    is_live = False

    def __init__(self, config: Config, device: torch.device, watchdog: Watchdog) -> None:
        self._timeout_s, self._watchdog = config.peer_timeout_s, watchdog
        self._device = device_of(device, config.parallel.transport)
        self._is_used = False

    @property
    def is_launched(self) -> bool:
        return "TORCHELASTIC_RUN_ID" in os.environ

    def form(self, *, as_last: bool = False) -> Formed | None:
        if self._is_used:
            return None
        self._is_used = True
        launched = context()
        return Formed(
            connect(_meeting_place(launched), self._timeout_s, self._device, self._watchdog.resting), launched
        )

    def note_state(self, *, is_there: bool) -> None:
        """Do nothing: there is no next world."""

    def wants_to_grow(self) -> bool:
        return False

    def published(self) -> str | None:
        return None

    def drop(self, rank: int) -> str:
        return "kept: a node can leave the others only where recovery is live"

    def leave(self, *, is_job_done: bool) -> None:
        """Do nothing: the launcher does it."""


class LiveWorlds:
    """One world after another, formed by this process's own membership, which begins with the first `form`."""

    is_live = is_launched = True

    def __init__(
        self,
        context: LiveContext,
        config: Config,
        device: torch.device,
        watchdog: Watchdog,
        is_stopped: Callable[[], bool],
        job: Job,
        standstill: Standstill,
        unformed: UnformedWorlds,
    ) -> None:
        self._context, self._is_stopped, self._watchdog, self._job = context, is_stopped, watchdog, job
        self._standstill, self._unformed = standstill, unformed
        self._has_trained = False
        self._config = config
        parallel = config.parallel
        copies = parallel.copies if parallel.shards != "none" else None
        self._cell = CellShape(parallel.cell.stage, parallel.cell.stage_size, copies, alike=parallel.cell.context)
        self._max_members = config.parallel.cell.most_ranks(config.batch.num_lanes)
        self._timeout_s = config.peer_timeout_s
        self._device = device_of(device, config.parallel.transport)
        self._member: LiveMember | None = None
        self.num_not_formed = 0
        """Number of consecutive worlds that did not form."""

    def form(self, *, as_last: bool = False) -> Formed | None:
        if self._member is None:
            self._member = self._be_member()
            self._check_store(self._member)
        elif self._has_trained:
            self._standstill.note("it ended before a step was applied that stayed", self._committed())
        pause_s = FIRST_PAUSE_S
        while True:
            with translated():
                world = self._member.next_world(self._is_stopped, as_last=as_last)
            if world is None:
                self._check_what_is_done(self._member.closed)
                return None
            try:
                group = self._connect(self._member, world)
            except PeerLostError as error:
                # It fell apart before it began; back off before the next try.
                self._note_not_formed(self._member, world, error)
                time.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
                continue
            self.num_not_formed, self._has_trained = 0, True
            return Formed(group, world.context)

    def _connect(self, member: LiveMember, world: LiveWorld) -> Group:
        return Group(
            world.rank,
            world.size,
            world.store,
            self._timeout_s,
            self._device,
            address=self._context.address,
            is_broken=member.is_broken,
            resting=self._watchdog.resting,
        )

    def _note_not_formed(self, member: LiveMember, world: LiveWorld, error: PeerLostError) -> None:
        """Count a world that did not form; from the second on, look for unreachable nodes."""
        self.num_not_formed += 1
        self._unformed.note(world.context.term, world.rank, world.size, str(error))
        if self.num_not_formed > 1:
            member.look_for_unreachable()
            log.warning(
                "%d worlds in a row did not form, the last of term %d, %d ranks on %d nodes: %s. The nodes are asked "
                "whether they can be reached; those that cannot are left out",
                *(self.num_not_formed, world.context.term, world.size, world.context.num_nodes, error),
            )
        self._standstill.note(f"it did not form: {error}", self._committed())

    def _check_what_is_done(self, done: Closed | None) -> None:
        """Return if the job is done; raise ConfigError if another job was done under this run id.

        A process that has trained in one of its worlds has already been compared with its other members.
        """
        if done is None or self._has_trained:
            return
        at = datetime.datetime.fromtimestamp(done.at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        what = (
            f"the job of the run id {self._context.run_id!r} was finished at {at} in {done.job.folder or 'its folder'}"
        )
        if done.job.digest and done.job != self._job:
            differs = "folder" if done.job.digest == self._job.digest else "configuration"
            raise ConfigError(
                f"{what}, and this one has another {differs} (it would commit to {self._job.folder}): nothing was "
                f"trained. Give it a run id of its own (--id, --rdzv_id), or start it {CLOSED_S:.0f} s after that one."
            )
        log.warning("%s: nothing is left to do", what)

    def _check_store(self, member: LiveMember) -> None:
        """Leave before joining if this node does not see the store with the job's commits.

        A finished job is not joined: its end is reported instead.
        """
        if member.closed is not None:
            return
        try:
            one_store.check_before_joining(self._config, member.store, self._watchdog.moved)
        except ConfigError:
            member.leave()
            raise

    def _be_member(self) -> LiveMember:
        """Begin the membership; wait while etcd is unreachable, as members do."""
        deadline, outage = time.monotonic() + self._context.timeout_s, OutageLog(log)
        while True:
            try:
                return LiveMember(
                    self._context, self._max_members, self._job, cell=self._cell, at_request=_ask_to_leave
                )
            except StoreUnavailableError as error:
                if self._is_stopped():
                    raise Preempted("asked to leave while etcd was away") from error
                if time.monotonic() > deadline:
                    raise StorageError(str(error)) from error
                outage.waits(error, deadline - time.monotonic())
                time.sleep(ETCD_PAUSE_S)

    def note_state(self, *, is_there: bool) -> None:
        assert self._member is not None, "a world has formed"
        self._member.note_state(is_there=is_there)

    def wants_to_grow(self) -> bool:
        return self._member is not None and self._member.wants_to_grow()

    def published(self) -> str | None:
        return self._member.published if self._member is not None else None

    def _committed(self) -> int:
        """Return the step of the commit that etcd names as head, 0 without one."""
        place = place_of(key) if (key := self.published()) else None
        return place[1] if place else 0

    def drop(self, rank: int) -> str:
        assert self._member is not None, "who has ranks is a member"
        node = self._member.ask_to_leave(rank)
        fewest = counted(self._context.min_nodes, "node")
        return f"dropped: node {node} is asked to leave" if node else f"kept: the job needs at least {fewest}"

    def leave(self, *, is_job_done: bool) -> None:
        if self._member is not None:
            if is_job_done:
                self._member.close_job()
            self._member.leave()


def _ask_to_leave() -> None:
    """Forward a request from etcd as the signal that an operator could have sent: an early warning."""
    log.warning("asked to leave over etcd")
    os.kill(os.getpid(), signal.SIGUSR1)


def open_worlds(
    config: Config,
    device: torch.device,
    watchdog: Watchdog,
    is_stopped: Callable[[], bool],
    job: Job,
    reached: Callable[[], int],
    unformed: UnformedWorlds,
) -> Worlds:
    """Return the worlds that the launcher has prepared for a job; `is_stopped` ends the wait for one.

    `reached` returns this process's last applied step; `unformed` records worlds that did not form.
    """
    launched = live_context()
    if launched is None:
        return OneWorld(config, device, watchdog)
    standstill = Standstill(config.give_up_after_worlds, config.give_up_after_s, reached)
    return LiveWorlds(launched, config, device, watchdog, is_stopped, job, standstill, unformed)


def own_run_id() -> str:
    """Return the run id of this process's job; empty without a launcher."""
    launched = live_context() or context()
    return launched.run_id if launched is not None else os.environ.get("TORCHELASTIC_RUN_ID", "")


def own_path() -> tuple[str, str]:
    """Return this process's failure domains, from the widest to the narrowest, e.g. rack and node."""
    launched = live_context()
    node = launched.node if launched is not None else os.environ.get("GROUP_RANK", "0")
    return (os.environ.get(DOMAIN, ""), node)


def _meeting_place(launched: RendezvousContext | None) -> str:
    """Return a name that no earlier world of this job has used at the same store."""
    if launched is not None:
        return f"term-{launched.term}"
    return f"round-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
