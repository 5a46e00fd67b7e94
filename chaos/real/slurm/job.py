"""One training job on a Slurm cluster, followed through its histories and Slurm, and the record of its faults.

It keeps the same record as the local executor. It knows processes from histories: pids on a node are the node's own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.errors import RunError
from chaos.judge.evidence.run_files import Line, parse_lines, whole
from chaos.real.history_tail import Followed
from chaos.real.leftovers import drafts
from chaos.real.slurm.acts import ACTS, Act, Undo
from chaos.real.slurm.submission import Submission
from chaos.scenario.model import Scenario
from chaos.scenario.schedule import Due
from chaos.services.slurm.cluster import ENDED, SlurmCluster
from rendezvous.process_table import environ_of

LOOK_EVERY_S, _ASK_EVERY_S = 0.1, 2.0
"""Seconds between reads of histories, and between queries whether the job still runs."""
_DYING_S = 60.0
_SETTLED_STEPS = 3
"""Steps of a newer world after which a fault's consequences are over."""


@dataclass(slots=True)
class SlurmJob:
    """A job, the faults done to it, and their observed effects."""

    folder: Path
    cluster: SlurmCluster
    submission: Submission
    scenario: Scenario
    seed: int
    replay: str
    followed: Followed = field(default_factory=Followed)
    struck: Sequence[Line] = ()
    num_starts: int = 0
    num_nodes: int = 0
    """Number of nodes that train once all faults are undone."""
    _num_faults: int = 0
    _term_before: int = 0
    """Newest term of a member that the newest fault hit, or else of all."""
    _asked_at: float = 0.0
    _has_ended: bool = False
    _undos: list[tuple[float, str, Undo]] = field(default_factory=list)
    _placed: set[tuple[object, object, object]] = field(default_factory=set)

    def begin(self) -> None:
        (self.folder / "history").mkdir(parents=True, exist_ok=True)
        self._record_scenario()
        self.num_nodes = self.scenario.slurm.at_first or self.scenario.nodes.count
        self.submission.begin()

    def has_come(self, fault: Due) -> bool:
        """Return True if a fault is due, apart from the seconds after the previous one."""
        if fault.at_s is not None:
            return self.followed.began_at is not None and time.time() >= self.followed.began_at + fault.at_s
        return self.followed.step > 0 and fault.has_come(self.followed.step)

    def strike(self, fault: Due) -> Undo | None:
        """Do a fault, and record it with the time just before; return its undo."""
        act = ACTS[fault.kind]
        hosts = act.hosts(self, fault)
        self.struck, at = act.hit([m for m in self.members() if m["host"] in hosts]), time.time()
        self.num_starts = 0 if act.affects_one else int(self.cluster.job(self.submission.allocation)["Restarts"])
        self._note(fault, hosts, at)
        self._term_before = max((whole(member, "term") for member in self.struck), default=self.followed.term)
        undo = act.do(self, fault)
        self.num_nodes += {"start_node": 1, "stop_node": 0 if undo else -1}.get(fault.kind, 0)
        return undo

    def has_bitten(self, fault: Due) -> bool:
        return ACTS[fault.kind].has_bitten(self, fault)

    def settle(self, fault: Due, undo: Undo | None) -> None:
        """Record the proof of a fault, and schedule its undo; its time starts now."""
        self.record("effect", fault=self._num_faults, kind=fault.kind, point=None, proof=ACTS[fault.kind].proof)
        if undo is not None:
            self._undos.append((time.monotonic() + (fault.for_s or 0.0), fault.kind, undo))

    def is_over(self, fault: Due) -> bool:
        """Return True if the fault is undone and the job trains again: in a newer world if the fault ends one, and at
        full size if its nodes come back by themselves. An allocation gets a node back only at the job's next start."""
        act = ACTS[fault.kind]
        if self._undos or not act.ends_world:
            return not self._undos
        is_whole = self.followed.world == self.num_nodes * self.scenario.nodes.ranks
        steps = sum(line["op"] == "step" for line in self._lines(self.followed.term))
        is_newer = self.followed.term > self._term_before and steps > _SETTLED_STEPS
        return is_newer and (is_whole or not self._comes_back(act))

    def has_ended(self) -> bool:
        """Ask Slurm now and then whether all of its jobs are over."""
        if not self._has_ended and time.monotonic() >= self._asked_at + _ASK_EVERY_S:
            self._asked_at = time.monotonic()
            self._has_ended = all(state in ENDED for state in self.submission.states())
        return self._has_ended

    def close(self) -> None:
        """Record what it left behind; raise RunError unless all of its jobs completed."""
        self._place()
        if wrong := set(self.submission.states()) - {"COMPLETED"}:
            raise RunError(f"the job ended as {', '.join(sorted(wrong))}; {self.submission.said()}")
        for node in sorted({self.cluster.nodes.index(str(host)) for host, _, _ in self._placed}):
            self.record("exit", node=node, code=0)  # Slurm reports all of its jobs as completed
        self.record("clean", orphans=self._left(), drafts=drafts(self.folder))

    def look(self) -> None:
        """Read the histories' news, and undo what is due."""
        for pending in [pending for pending in self._undos if time.monotonic() >= pending[0]]:
            self._undos.remove(pending)
            pending[2]()
            self.record("undo", kind=pending[1], **_named([]))
        self.followed.look(self.folder)
        self._place()

    def members(self) -> list[Line]:
        """Return the `form` lines of the newest world."""
        return [line for line in self._lines(self.followed.term) if line["op"] == "form"]

    def record(self, op: str, *, t: float | None = None, **fields: object) -> None:
        """Append a line to the executor's own history."""
        line = json.dumps({"op": op, "t": time.time() if t is None else t, **fields})
        with (self.folder / "history" / "chaos.jsonl").open("a") as file:
            file.write(line + "\n")

    def _comes_back(self, act: Act) -> bool:
        of_array = self.scenario.slurm.is_array or act.kind == "start_node"
        return of_array or not act.affects_one

    def _note(self, fault: Due, hosts: Sequence[str], at: float) -> None:
        self._num_faults += 1
        numbers = sorted(self.cluster.nodes.index(host) for host in hosts)
        who: dict[str, Any] = {
            "target": fault.target,
            "node": numbers[0] if len(numbers) == 1 else None,
            "nodes": numbers,
        }
        moments: dict[str, Any] = {"at_step": fault.step, "is_drawn": fault.is_drawn, "seen_step": self.followed.step}
        seen: dict[str, Any] = {
            "seen_commit": self.followed.commit,
            "term": self.followed.term,
            "for_s": fault.for_s,
            "point": None,
        }
        self.record(
            "fault", t=at, number=self._num_faults, kind=fault.kind, **who, **moments, **seen, **_named(self.struck)
        )

    def _place(self) -> None:
        """Record the node of each process that has joined a world since the last look."""
        for member in self.members():
            key = member["host"], member["pid"], member["born"]
            if key not in self._placed:
                self._placed.add(key)
                self.record("node", node=self.cluster.nodes.index(str(member["host"])), **_named([member]))

    def _lines(self, term: int) -> Iterator[Line]:
        for path in sorted((self.folder / "history").glob(f"{term:08d}-*.jsonl")):
            yield from parse_lines(path.read_bytes())

    def _left(self) -> list[int]:
        """Return the job's processes that still run on its machines, by pids of this machine.

        Slurm ends what a job leaves behind, which may take a moment.
        """
        until = time.monotonic() + _DYING_S
        while True:
            running = [pid for name in self.submission.hosts for pid in self.cluster.machines[name].processes()]
            left = [pid for pid in running if self.submission.owns(environ_of(pid))]
            if not left or time.monotonic() > until:
                return left
            time.sleep(LOOK_EVERY_S)

    def _record_scenario(self) -> None:
        scenario, nodes = self.scenario, self.scenario.nodes
        limits: dict[str, Any] = {"patience_s": scenario.patience_s, "max_restarts": nodes.max_restarts}
        what: dict[str, Any] = {
            "name": scenario.name,
            "seed": self.seed,
            "recovery": nodes.recovery,
            "reference": scenario.reference,
        }
        how: dict[str, Any] = {
            "nonfinite": scenario.nonfinite,
            "spare_nodes": nodes.count - nodes.min,
            "replay": self.replay,
            "unseen": ["shared_memory"],  # cannot be observed on a cluster's nodes
        }
        kinds = scenario.slurm.kinds()
        self.record("scenario", **what, **limits, **how, kinds=kinds, points=[], point_kinds=[], missing={})


def _named(members: Sequence[Line]) -> dict[str, Any]:
    """Return what identifies processes: pids on their hosts, and birth times."""
    keys = {"pids": "pid", "hosts": "host", "born": "born"}
    return {name: [member[key] for member in members] for name, key in keys.items()}
