"""Inject faults when they are due: at a time, at a step, or at a failpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from chaos.scenario.kinds import affects_all, kind_of
from chaos.sim.job.fault import SimFault
from chaos.sim.job.fleet import Fleet
from chaos.sim.job.kinds import KINDS
from chaos.sim.job.run_record import named
from chaos.sim.machine.kernel import Killed, Process
from chaos.sim.modelled.plan import FILE

TIMES = {"scale_down": 5.0, "start_twin": 5.0}
"""Duration factors by kind."""
WHOSE: Mapping[str, Callable[[Fleet, list[Process]], list[int]]] = {
    "slow_etcd": lambda fleet, hit: [node.number for node in fleet.nodes],  # here for all of them
    "twin_dir": lambda fleet, hit: [agent.node for agent in hit],
}
"""Nodes that a fault affects, for kinds that affect others than the one drawn."""


class Injector:
    """A job's faults; those that take effect are in the history, and counted in `num_faults` by kind (kind@point)."""

    def __init__(self, fleet: Fleet, faults: tuple[SimFault, ...]) -> None:
        self._fleet, self._faults, self._kernel, self._record = fleet, faults, fleet.kernel, fleet.record
        self.num_faults: dict[str, int] = {}
        self._armed: dict[str, dict[int, list[SimFault]]] = {}
        self._reached: dict[str, int] = {}
        self._awaited = sorted((fault for fault in faults if fault.step), key=lambda fault: fault.step)
        fleet.record.on_step = self._take_step
        fleet.around.storage.at_tear = self._note_tear

    @property
    def last_end_s(self) -> float:
        """When the last timed fault is over, in seconds from the job's start."""
        return max((fault.at_s + (0.0 if fault.point else fault.for_s) for fault in self._faults), default=0.0)

    def begin(self) -> None:
        """Schedule all faults that wait for no step."""
        for fault in self._faults:
            if fault.step == 0:
                self._await_moment(fault)

    def reach(self, point: str) -> None:
        """Inject the faults that wait for this hit of a failpoint."""
        self._reached[point] = nth = self._reached.get(point, 0) + 1
        armed = self._armed.get(point)
        for fault in armed.pop(nth, ()) if armed else ():
            self._strike_here(fault)

    def _take_step(self, step: int) -> None:
        while self._awaited and self._awaited[0].step <= step:
            self._await_moment(self._awaited.pop(0))

    def _await_moment(self, fault: SimFault) -> None:
        act = self._arm if fault.point else self._strike
        self._kernel.after(fault.at_s, lambda: act(fault))

    def _arm(self, fault: SimFault) -> None:
        """Arm a fault at its failpoint; hits are counted from now on."""
        nth = self._reached.get(fault.point, 0) + fault.nth
        self._armed.setdefault(fault.point, {}).setdefault(nth, []).append(fault)

    def _strike_here(self, fault: SimFault) -> None:
        process = self._kernel.process
        self._note(fault, [process], process.node, fault.for_s)
        self._fleet.keep_busy(0.0)
        if fault.kind == "kill":
            self._kernel.kill(process)
            raise Killed
        if fault.kind == "raise":
            raise RuntimeError(f"planted at {fault.point}")
        self._fleet.freeze([process], fault.for_s)
        self._kernel.sleep(0.0)

    def _strike(self, fault: SimFault) -> None:
        if self._record.is_done:
            return
        fleet, storage = self._fleet, self._fleet.around.storage
        before = len(storage.damaged)
        hit = KINDS[fault.kind](fleet, fault)
        for_s = fault.for_s * TIMES.get(fault.kind, 1)
        fleet.keep_busy(for_s)
        damaged = [*storage.damaged.values()][before:]
        # Faults that affect all nodes, or the path to etcd, count even if no worker noticed.
        if hit or damaged or affects_all(fault.kind) or kind_of(fault.kind).cuts_off:
            more: dict[str, Any] = {"commit": damaged[0]} if damaged else {}
            if fault.kind == "bad_row_group":
                more |= {"file": FILE, "row_group": fault.other % len(fleet.shape.rows)}
            if fault.kind in WHOSE:
                more["nodes"] = WHOSE[fault.kind](fleet, hit)
            self._note(fault, hit, fleet.node(fault), for_s, **more)

    def _note(self, fault: SimFault, hit: list[Process], node: int, for_s: float, **more: Any) -> None:
        name = f"{fault.kind}@{fault.point}" if fault.point else fault.kind
        self.num_faults[name] = self.num_faults.get(name, 0) + 1
        who: dict[str, Any] = {"kind": name, "target": node, "node": node, "signal": None, **named(hit)}
        seen = {"seen_step": self._record.step, "seen_commit": None, "term": self._record.term}
        self._record.write("chaos", "fault", **who, at_step=None, is_drawn=False, **seen, **more, for_s=for_s)

    def _note_tear(self, writer: Process) -> None:
        self._record.write("chaos", "undo", kind="tear_write", **named([writer]))
