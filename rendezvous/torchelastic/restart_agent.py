"""The agent of `restart` mode: TorchElastic's own, without what makes a lost node expensive.

TorchElastic's agent charges `max_restarts` whenever workers fail, even because a node was lost; waits 30 s for workers
that cannot stop, and 300 s at the end for peers that are gone. One method is overridden here for each.
"""

from __future__ import annotations

import hashlib
import logging
import signal
from collections.abc import Iterable
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState

from rendezvous.membership.records import Job
from rendezvous.membership.worlds import Seat
from rendezvous.torchelastic.bound_agent import FINAL_CODES, BoundAgent
from rendezvous.torchelastic.restart_handler import EtcdRendezvousHandler

MOST_SHOWN = 200
"""Maximum number of final characters of a command in messages."""

_log = logging.getLogger("rendezvous")


class ElasticAgent(BoundAgent):
    """TorchElastic's agent, with restarts decided by membership."""

    def __init__(self, spec: WorkerSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        assert isinstance(spec.rdzv_handler, EtcdRendezvousHandler)
        self._membership = spec.rdzv_handler
        self._membership.bring(spec.local_world_size, spec.role)
        self._membership.node.job = _job_of(spec)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Report workers that failed because of another node as healthy: the next check restarts them for free."""
        result: RunResult = super()._monitor_workers(worker_group)
        for failure in result.failures.values():
            if failure.exitcode != -signal.SIGTERM:  # the signal with which the agent has ended the others
                how = self._how_it_ended(failure.local_rank, failure.exitcode)
                _log.warning("worker %d %s", failure.local_rank, how)
        if any(failure.exitcode in FINAL_CODES for failure in result.failures.values()):
            self._remaining_restarts = 0  # replacements would fail as well: this node leaves
        elif result.state is WorkerState.FAILED and self._membership.is_restart_free():
            _log.warning("workers failed because of another node: restarting them, max_restarts is not spent")
            return RunResult(state=WorkerState.HEALTHY)
        return result

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Number the workers by the sealed world alone, without an exchange that a dying node could block."""
        world = self._membership.node.world
        assert world is not None, "ranks are assigned in a world"
        before, role = world.seats[:group_rank], world.seats[group_rank].role
        lo, total = _num_workers(before), _num_workers(world.seats)
        role_lo, role_total = _num_workers(before, role), _num_workers(world.seats, role)
        return [
            Worker(
                local_rank=i, global_rank=lo + i, role_rank=role_lo + i, world_size=total, role_world_size=role_total
            )
            for i in range(spec.local_world_size)
        ]

    def _shutdown(self, death_sig: signal.Signals | None = None, timeout: int | None = None) -> None:
        """End the workers; a signal is named if and only if this agent was asked to leave by it."""
        if death_sig is not None:
            self._membership.node.begin_to_leave()  # before its workers end, and with them those of other nodes
        super()._shutdown(death_sig or signal.SIGTERM, timeout)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=max(1, round(self._membership.stop_grace_s)))

    def _exit_barrier(self) -> None:
        """Wait for the others of this world to finish or to be gone, and close the job with the last."""
        self._membership.node.finish(self._exit_barrier_timeout)


def _num_workers(seats: Iterable[Seat], role: str | None = None) -> int:
    """Return the number of workers of seats, of one role or of all."""
    return sum(seat.num_workers for seat in seats if role in (None, seat.role))


def _job_of(spec: WorkerSpec) -> Job:
    """Return the workers' program, for nodes that come after its end."""
    command = " ".join(str(part) for part in spec.args)
    return Job(command[-MOST_SHOWN:], hashlib.sha256(command.encode()).hexdigest()[:16])
