"""The agent of `live` mode, which removes and replaces single workers.

The agent knows nothing of the job's worlds. It starts workers, each of which becomes a member itself. When one dies, or
is stopped, it removes that worker's member from etcd at once, so that the others need not wait for a lease to end. It
replaces a dead worker while the node's other workers train on.

Restarts are counted per cause and hour: `max_restarts` deaths by signal, and as many by an error of the worker itself.
Workers that die together count once, as under torchrun, and one that ends because other ranks took state with them
(`STATE_LOST_CODE`) does not count. A node without restarts left leaves; the job continues for the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from rendezvous.agent.worker_end import Worker
from rendezvous.process_table import stat_of
from rendezvous.torchelastic.bound_agent import FINAL_CODES, BoundAgent
from rendezvous.torchelastic.live_handler import LiveRendezvousHandler

PER_S = 3600.0
TOGETHER_S = 5.0
"""Seconds within which workers of a node count as dying together, of one cause, e.g. lack of memory."""
STOPPED_S, STOPPED_FOR_GOOD_S, AWAY_S = 0.5, 60.0, 10.0
"""Seconds after which the others continue without a stopped worker, and after which it is replaced.

An agent that has not looked for longer than the third was stopped itself, so its knowledge of stopped workers is out of
date.
"""
SHORT_LIFE_S = 20.0
LONGEST_PAUSE_S = 30.0
DONE_GRACE_S = 60.0
# Exit codes with which a worker leaves on its own: done without result, preempted, too few nodes.
LEAVING_CODES = frozenset({74, 75, 77})
STATE_LOST_CODE = 79
"""Exit code of a worker that must start again, because state it needs was lost with other workers."""

_log = logging.getLogger("rendezvous")


class LiveAgent(BoundAgent):
    """Supervises workers one by one."""

    def __init__(self, spec: WorkerSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        assert isinstance(spec.rdzv_handler, LiveRendezvousHandler)
        self._rendezvous_handler = spec.rdzv_handler
        self._budget = Budget(spec.max_restarts)
        self._buried: set[int] = set()
        """Ranks whose current worker is dead and removed. Process ids are reused, so they are not recorded."""
        self._stopped_since: dict[int, float] = {}
        self._looked_at = 0.0
        self._buried_stopped: set[int] = set()
        self._born_at: dict[int, float] = {}
        self._young_deaths: Counter[int] = Counter()
        self._due_at: dict[int, float] = {}
        self._done_since: float | None = None
        # The stock agent would restart all workers when one has failed for good.
        self._remaining_restarts = 0

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Remove and replace dead workers; the stock method decides once none lives or one may not be replaced.

        Every worker is polled once: one that dies between two polls would otherwise seem removed already.
        """
        handlers = self._context().subprocess_handlers
        now, is_alive = time.monotonic(), False
        if now - self._looked_at > AWAY_S:
            self._stopped_since.clear()
        self._looked_at = now
        self._renew_standby()
        for rank, handler in list(handlers.items()):
            code = handler.proc.poll()
            self._born_at.setdefault(rank, now)
            if code is None:
                is_alive = True
                self._bury_if_stopped(rank, handler.proc.pid, now)
            if code is None or code == 0:
                continue
            if rank not in self._buried:
                self._buried.add(rank)
                self._rendezvous_handler.remove_dead_member(rank)
                if code not in LEAVING_CODES:
                    if not self._may_replace(rank, code, now):
                        return self._fail(worker_group, rank, code)
                    self._due_at[rank] = now + (0.0 if code == STATE_LOST_CODE else self._pause_s(rank, now))
                    how = self._how_it_ended(rank, code)
                    _log.warning("worker %d %s: another is started in its place", rank, how)
            if rank in self._due_at and now >= self._due_at[rank]:
                try:
                    self._replace(worker_group, rank)
                except OSError as error:  # no process can be started now: the node's other workers train on
                    if not self._budget.take("start", rank, now):
                        return self._fail(worker_group, rank, code)
                    self._due_at[rank] = now + LONGEST_PAUSE_S
                    _log.warning("worker %d cannot be started, and is tried again later: %s", rank, error)
                else:
                    del self._due_at[rank]
                is_alive = True
        if 0 in codes(handlers) and not self._due_at:
            self._end_the_rest(now)
        if self._due_at or is_alive:
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _bury_if_stopped(self, rank: int, pid: int, now: float) -> None:
        """Remove the member of a stopped worker (by signal or debugger), so that others need not wait for its lease.
        If it is not continued, it is killed and replaced, except under a debugger.
        """
        how = stopped_by(pid)
        if how is None:
            self._forget_stop(rank)
            return
        stopped_s = now - self._stopped_since.setdefault(rank, now)
        if stopped_s > STOPPED_S and rank not in self._buried_stopped:
            self._buried_stopped.add(rank)  # once is enough: while it is stopped it cannot join
            _log.warning("worker %d is stopped: the others continue without it", rank)
            self._rendezvous_handler.remove_dead_member(rank)
        if stopped_s > STOPPED_FOR_GOOD_S and how == "signal":
            _log.warning("worker %d was stopped by a signal %.0f s ago: killing and replacing it", rank, stopped_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _forget_stop(self, rank: int) -> None:
        self._stopped_since.pop(rank, None)
        self._buried_stopped.discard(rank)

    def _exit_barrier(self) -> None:
        """Do nothing: the workers have closed the job together."""

    def _end_the_rest(self, now: float) -> None:
        """Kill workers that still run long after the job is done: they are frozen, or hang."""
        self._done_since = self._done_since or now
        if now - self._done_since > DONE_GRACE_S:
            self._done_since = None  # their replacements learn that the job is done, and leave
            for handler in self._context().subprocess_handlers.values():
                if handler.proc.poll() is None:
                    handler.close(signal.SIGKILL)

    def _may_replace(self, rank: int, code: int, now: float) -> bool:
        """Return True if a dead worker may be replaced; charges the budget if it died by itself."""
        if code == STATE_LOST_CODE:
            return True
        return code not in FINAL_CODES and self._budget.take("signal" if code < 0 else "error", rank, now)

    def _fail(self, worker_group: WorkerGroup, rank: int, code: int) -> RunResult:
        why = "no restart is left (--max-restarts)"
        if code in FINAL_CODES:
            why = f"a restart would not change that ({FINAL_CODES[code]})"
        _log.error("worker %d %s, and %s: this node leaves", rank, self._how_it_ended(rank, code), why)
        handler = self._context().subprocess_handlers[rank]
        if isinstance(handler, Worker):
            handler.note_that_its_node_leaves(why)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _pause_s(self, rank: int, now: float) -> float:
        """Return the pause before a restart: none, unless the worker repeatedly died young."""
        if now - self._born_at[rank] > SHORT_LIFE_S:
            self._young_deaths[rank] = 0
            return 0.0
        self._young_deaths[rank] += 1
        return min(LONGEST_PAUSE_S, 2.0 ** (self._young_deaths[rank] - 2)) if self._young_deaths[rank] > 1 else 0.0

    def _replace(self, worker_group: WorkerGroup, rank: int) -> None:
        context = self._context()
        started = self._start_worker(
            entrypoint=context.entrypoint,
            args=context.args[rank],
            env=context.envs[rank],
            stdout=context.stdouts[rank],
            stderr=context.stderrs[rank],
            local_rank_id=rank,
            numa_options=worker_group.spec.numa_options,
        )
        context.subprocess_handlers[rank] = started
        self._renew_standby()
        context._running_local_ranks.add(rank)
        self._buried.discard(rank)
        self._forget_stop(rank)
        self._born_at[rank] = time.monotonic()
        for worker in worker_group.workers:
            if worker.local_rank == rank:
                worker.id = started.proc.pid

    def _context(self) -> SubprocessContext:
        assert isinstance(self._pcontext, SubprocessContext), "workers are programs, and have been started"
        return self._pcontext


def codes(handlers: Mapping[int, SubprocessHandler]) -> list[int | None]:
    """Return every worker's exit code, None while it runs."""
    return [handler.proc.poll() for handler in handlers.values()]


def stopped_by(pid: int) -> Literal["signal", "debugger"] | None:
    """Return what has stopped a process; None if it is not stopped, or there is no /proc."""
    stat = stat_of(pid)
    return None if stat is None else "signal" if stat.state == "T" else "debugger" if stat.state == "t" else None


@dataclass(slots=True)
class Taken:
    """A restart charged to a budget: its time, and its ranks."""

    at: float
    ranks: set[int]


class Budget:
    """A maximum number of restarts per cause and hour."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: dict[str, deque[Taken]] = defaultdict(deque)

    def take(self, cause: str, rank: int, now: float) -> bool:
        """Charge a restart to a cause, unless others that died together with this rank were.

        Return False if none is left.
        """
        taken = self._taken[cause]
        while taken and now - taken[0].at > PER_S:
            taken.popleft()
        if taken and now - taken[-1].at <= TOGETHER_S and rank not in taken[-1].ranks:
            taken[-1].ranks.add(rank)
            return True
        if len(taken) >= self._most:
            return False
        taken.append(Taken(now, {rank}))
        return True
