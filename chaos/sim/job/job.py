"""A job in the simulated world, from its start to the evidence for the judge."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from chaos.judge.evidence.identities import identified
from chaos.judge.evidence.run_files import Commit, Evidence, is_void, with_one_clock
from chaos.scenario.kinds import ALIENS
from chaos.sim.job.fault import SimFault
from chaos.sim.job.fleet import Fleet
from chaos.sim.job.host import Host
from chaos.sim.job.injector import Injector
from chaos.sim.job.install.installed import installed
from chaos.sim.job.live_node import RUN_ID
from chaos.sim.job.run_record import RunRecord
from chaos.sim.job.shape import Shape
from chaos.sim.job.surroundings import Surroundings
from chaos.sim.machine.etcd import LEAST_TTL_S
from chaos.sim.machine.object_store import Storage
from chaos.sim.modelled.commit_files import load_weights
from elastic_train.config.schema import Config
from rendezvous.membership.records import Keys

PATIENCE_S = 1800.0
"""Liveness bound: virtual seconds after the last fault, beyond the job's own duration, within which it must end."""
LOOK_S, RESTART_S = 10.0, 60.0
"""Interval of the operator's checks, and the delay before a failed node is restarted, whatever faults are to come."""


class Job:
    """One simulated run; `bug` replaces product code by path, to plant a bug."""

    def __init__(
        self,
        shape: Shape,
        seed: int,
        faults: tuple[SimFault, ...],
        *,
        bug: Mapping[str, object] | None = None,
        first_pid: int = 1000,
        nonfinite: Collection[int] = (),
    ) -> None:
        """`nonfinite` lists the steps, counted from 0, whose losses are never finite."""
        spoils_data = any(fault.kind == "bad_row_group" for fault in faults)
        self.around = Surroundings(shape, seed, may_spoil_data=spoils_data, first_pid=first_pid)
        self.record = RunRecord(self.around.kernel)
        self._host = Host(self.around, self.record, nonfinite)
        self._fleet = Fleet(self._host)
        self.injector = Injector(self._fleet, faults)
        self._bug = bug or {}

    def run(self) -> Evidence:
        """Run until the job ends, or patience runs out, and return the judge's evidence."""
        host, kernel, tracking = self._host, self.around.kernel, self.around.tracking
        with installed(host, self._fleet.nodes, self.injector.reach, self._bug), tracking or contextlib.nullcontext():
            self._begin()
            leases = None
            try:
                self._conduct()
                if tracking is not None:
                    tracking.sync()
                leases = self._outlived()
            finally:
                left = [process.pid for process in host.workers if not process.is_dead]
                self.record.write("chaos", "clean", orphans=left, leases=leases)
                kernel.close()
            return left_by(self.around, self.record, host.plan.config)

    def _begin(self) -> None:
        fleet, kernel = self._fleet, self.around.kernel
        for node in fleet.nodes:
            kernel.after(self._host.pace.uniform(0.0, 1.0), lambda node=node: fleet.start_node(node.number))  # type: ignore[misc]
        self.injector.begin()

    def _outlived(self) -> list[str] | None:
        """Return the member keys that outlived their leases; None unless the job is done and all nodes are down."""
        if not self.record.is_done or any(node.is_up for node in self._fleet.nodes):
            return None
        self.around.kernel.sleep(2 * self.around.shape.ttl_s + LEAST_TTL_S)
        return sorted(key for key in self.around.etcd.show(Keys(RUN_ID).members).entries if not key.endswith(ALIENS))

    def _conduct(self) -> None:
        fleet, kernel, shape = self._fleet, self.around.kernel, self.around.shape
        last, looked_at = self.injector.last_end_s, 0.0
        while kernel.now < max(last, fleet.busy_until) + shape.span_s + PATIENCE_S:
            kernel.sleep(1.0)
            if kernel.now > looked_at + LOOK_S:
                looked_at = kernel.now
                self._restart_failed()
            is_quiet = kernel.now > max(last, fleet.busy_until)
            is_up = any(node.is_up for node in fleet.nodes)
            if self.record.is_done and not is_up and kernel.now > fleet.busy_until:
                return  # the remaining faults have no target
            own = fleet.nodes[: shape.nodes]
            if not is_up and is_quiet:
                if all(node.would_end_alike for node in own):
                    return
                for node in own:
                    fleet.start_again(node.number)  # as an operator would
            elif is_quiet and not self.record.is_done and kernel.now > 1.0:
                for node in own:
                    if not node.is_up and node.agent is not None and not node.would_end_alike:
                        fleet.start_again(node.number)

    def _restart_failed(self) -> None:
        """Restart nodes that have failed, as an operator would after a while."""
        for node in self._fleet.nodes[: self.around.shape.nodes]:
            if node.is_up or node.agent is None or node.would_end_alike:
                node.down_for_s = 0.0
            elif self.around.kernel.now >= node.away_until:
                node.down_for_s += LOOK_S
                if node.down_for_s >= RESTART_S:
                    self._fleet.start_again(node.number)


def _commits(store: Storage) -> list[Commit]:
    """Return the commits of one store; a job that used several has no single lineage."""
    return [
        Commit.of(key, content)
        for key, (content, _) in sorted(store.files.items())
        if key.startswith("commits/") and not is_void(content)
    ]


def left_by(around: Surroundings, record: RunRecord, config: Config) -> Evidence:
    """Return the evidence of a job that has been run."""
    shape, tracking = around.shape, around.tracking
    promised: dict[str, Any] = {
        "recovery": shape.recovery,
        "patience_s": shape.patience_s,
        "recovery_s": shape.recovery_s,
        "max_restarts": shape.max_restarts,
    }
    record.write(
        "chaos",
        "scenario",
        name="sim",
        seed=around.seed,
        spare_nodes=shape.nodes - shape.min_nodes,
        **promised,
        command=[],
    )
    left = Evidence(
        folder=Path("sim"),
        processes=identified([record.lines[name] for name in sorted(record.lines)]),
        commits=[commit for store in (around.storage, *around.storage.ever_private) for commit in _commits(store)],
        config=config.model_dump(mode="json"),
        result=record.result,
        witness=record.witness if record.is_done else None,
        metrics=None if tracking is None else tracking.metrics,
        tracked=None if tracking is None else tracking.server.held(),
        rows=sum(shape.rows),
        load=functools.partial(load_weights, around.storage.files),
    )
    return with_one_clock(left)
