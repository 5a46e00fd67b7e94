"""Runs a scenario's job on a real Slurm, whose nodes are machines in namespaces: one allocation, by `train.sbatch`.

Follows the run's histories to know the step, does each fault when it is due, undoes it when its time is over, and
records both as the executor of one machine does. Of processes it knows what histories say of them: on a node they have
numbers of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import elastic_train
from chaos.errors import RunError, ScenarioError
from chaos.judge.evidence.run_files import Line, parse_lines
from chaos.real.history_tail import Followed
from chaos.real.leftovers import drafts
from chaos.real.slurm_acts import ACTS, Act
from chaos.scenario.kinds import KINDS
from chaos.scenario.model import Scenario
from chaos.scenario.schedule import Due
from chaos.services.slurm.cluster import ENDED, PATH, SlurmCluster, folder_of_a_cluster, why_no_slurm
from rendezvous.etcd.server import find_binary
from rendezvous.process_table import environ_of

SCRIPT = Path(elastic_train.__file__).parent / "cli" / "places" / "deploy" / "slurm" / "train.sbatch"
FAULTS_ARE_OVER = "all faults are over"
_LOOK_EVERY_S, _ASK_EVERY_S = 0.1, 2.0
"""How often histories are read, and Slurm is asked whether the job still runs."""
_LOOK_FOR_FIRST_S = 5
_DYING_S = 60.0
_SETTLED_STEPS = 3
"""So many steps of a newer world show that what a fault led to is over."""


def run_on_slurm(
    scenario: Scenario,
    folder: Path,
    due: Sequence[Due],
    seed: int,
    arguments: Sequence[str],
    replay: str,
    say: Callable[[str], object],
    *,
    shared: Sequence[Path] = (),
) -> None:
    """Run the scenario's job with these faults on a Slurm cluster of its own; RunError if it does not come to its end.

    Raises ScenarioError where there can be no Slurm. Of /tmp, machines share the folder, this one, the sources and what
    else is `shared`.
    """
    if why := why_no_slurm():
        raise ScenarioError(f"{scenario.name}: {why}")
    known = [folder.resolve(), Path.cwd(), Path(elastic_train.__file__).parents[1], Path(sys.prefix)]
    with folder_of_a_cluster() as own, SlurmCluster(own, scenario.nodes.count, shared=[*known, *shared]) as cluster:
        SlurmJob(folder.resolve(), cluster, scenario, seed, arguments, replay, say).run(due)


@dataclass(slots=True)
class SlurmJob:
    """One job on a cluster, and what was done to it."""

    folder: Path
    cluster: SlurmCluster
    scenario: Scenario
    seed: int
    arguments: Sequence[str]
    replay: str
    say: Callable[[str], object]
    job: str = ""
    """Its number, once it is submitted."""
    num_starts: int = 0
    """How often it had been started again when the newest fault was done."""
    followed: Followed = field(default_factory=Followed)
    _asked_at: float = 0.0
    _num_faults: int = 0
    _undos: list[tuple[float, str, Callable[[], object]]] = field(default_factory=list)
    _placed: set[tuple[object, object, object]] = field(default_factory=set)
    _deadline: float = 0.0

    def run(self, due: Sequence[Due]) -> None:
        """Submit the job, do each fault when it is due, and wait for the job's end."""
        (self.folder / "history").mkdir(parents=True, exist_ok=True)
        self._deadline = time.monotonic() + self.scenario.timeout_s
        self._record_scenario()
        self.job = self._submit()
        try:
            for fault in due:
                self._inject(fault)
            self.say(FAULTS_ARE_OVER)
            while not self._has_ended():
                self._wait_a_moment("its end")
        except RunError as error:
            self.record("stuck", why=str(error))
            raise
        finally:
            self._place()
        if (state := self.cluster.state(self.job)) != "COMPLETED":
            raise RunError(f"the job ended as {state}; {self._log()}")
        self.record("clean", orphans=self._left(), drafts=drafts(self.folder))

    def _submit(self) -> str:
        nodes = self.scenario.nodes
        own = ["--run.dir", str(self.folder), "--run.name", f"{self.scenario.name}-{self.folder.name}"]
        size = ["--nodes", f"{nodes.min}:{nodes.count}", "--ranks", f"{nodes.ranks}"]
        size += ["--ttl-s", f"{nodes.lease_ttl_s:g}", "--max-restarts", f"{nodes.max_restarts}"]
        programs = f"{Path(sys.executable).parent}:{Path(find_binary()).parent}:{PATH}"
        where = [f"--nodes={nodes.count}", "-D", str(Path.cwd()), "-o", str(self.folder / "slurm.log")]
        assert self.scenario.config is not None, "the command line has asked"
        command = [str(SCRIPT), self.scenario.config, *size, *self.arguments, *own]
        look = f"{_LOOK_FOR_FIRST_S}"
        return self.cluster.submit(*where, *command, PATH=programs, LOOK_S=look, OMP_NUM_THREADS="1")

    def _inject(self, fault: Due) -> None:
        """Wait until a fault is due, do it, and record it; go on once it has shown that it bit."""
        act, moment = ACTS[fault.kind], time.monotonic() + (fault.after_s or 0.0)
        self._wait(lambda: time.monotonic() >= moment and self._has_come(fault), str(fault))
        hosts = act.hosts(self, fault)
        members, at = [m for m in self.members() if m["host"] in hosts], time.time()
        self.num_starts = int(self.cluster.job(self.job)["Restarts"])
        self._note(fault, members, hosts, at)
        undo = act.do(self, fault)
        self._wait(lambda: act.has_bitten(self, fault), f"an effect of {fault.kind}")
        self.record("effect", fault=self._num_faults, kind=fault.kind, point=None, proof=act.proof)
        if undo is not None:
            self._undos.append((time.monotonic() + (fault.for_s or 0.0), fault.kind, undo))
        self._wait(lambda: self._is_over(act, self._term_of(members)), f"steps after {fault.kind}")

    def _has_come(self, fault: Due) -> bool:
        if fault.at_s is not None:
            return self.followed.began_at is not None and time.time() >= self.followed.began_at + fault.at_s
        return self.followed.step > 0 and fault.has_come(self.followed.step)

    def _is_over(self, act: Act, term: int) -> bool:
        """Say whether it is undone, and the job trains again: in a newer world if the fault ends one, whole if it asks
        all to leave. A node that comes back is the job's again at the job's next start, and not before."""
        if self._undos or not act.ends_world:
            return not self._undos
        is_whole = self.followed.world == self.scenario.nodes.count * self.scenario.nodes.ranks
        steps = sum(line["op"] == "step" for line in self._lines(self.followed.term))
        return self.followed.term > term and steps > _SETTLED_STEPS and (is_whole or act.befalls_one)

    def _note(self, fault: Due, members: list[Line], hosts: Sequence[str], at: float) -> None:
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
            "fault", t=at, number=self._num_faults, kind=fault.kind, **who, **moments, **seen, **_named(members)
        )
        self.say(f"fault {self._num_faults}: {fault.kind} at step {self.followed.step}")

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        """Look until something is so; RunError if the job ends before, or its time is over."""
        self._look()
        while not is_so():
            self._wait_a_moment(what)
            if self._has_ended():
                raise RunError(f"the job ended as {self.cluster.state(self.job)} before {what}; {self._log()}")

    def _wait_a_moment(self, what: str) -> None:
        if time.monotonic() > self._deadline:
            raise RunError(f"{what} did not come within {self.scenario.timeout_s:.0f} s; {self._log()}")
        time.sleep(_LOOK_EVERY_S)
        self._look()

    def _has_ended(self) -> bool:
        """Ask Slurm now and then whether the job is over."""
        if time.monotonic() < self._asked_at + _ASK_EVERY_S:
            return False
        self._asked_at = time.monotonic()
        return self.cluster.state(self.job) in ENDED

    def _look(self) -> None:
        for pending in [pending for pending in self._undos if time.monotonic() >= pending[0]]:
            self._undos.remove(pending)
            pending[2]()
            self.record("undo", kind=pending[1], **_named([]))
        self.followed.look(self.folder)
        self._place()

    def _place(self) -> None:
        """Record on which node the processes run that have come into a world since the last look."""
        for member in self.members():
            key = member["host"], member["pid"], member["born"]
            if key not in self._placed:
                self._placed.add(key)
                self.record("node", node=self.cluster.nodes.index(str(member["host"])), **_named([member]))

    def members(self) -> list[Line]:
        """Return the lines with which the processes of the newest world have recorded it."""
        return [line for line in self._lines(self.followed.term) if line["op"] == "form"]

    def _term_of(self, members: list[Line]) -> int:
        return max((int(str(member["term"])) for member in members), default=self.followed.term)

    def _lines(self, term: int) -> Iterator[Line]:
        for path in sorted((self.folder / "history").glob(f"{term:08d}-*.jsonl")):
            yield from parse_lines(path.read_bytes())

    def _left(self) -> list[int]:
        """Return the processes of the job that its machines still run, in this machine's numbers.

        Slurm ends what a job leaves behind, and may take a moment for that.
        """
        until = time.monotonic() + _DYING_S
        while True:
            running = [pid for name in self.cluster.nodes for pid in self.cluster.machines[name].processes()]
            left = [pid for pid in running if environ_of(pid).get("SLURM_JOB_ID") == self.job]
            if not left or time.monotonic() > until:
                return left
            time.sleep(_LOOK_EVERY_S)

    def _record_scenario(self) -> None:
        scenario, nodes = self.scenario, self.scenario.nodes
        kinds = [name for name, kind in KINDS.items() if kind.slurm]
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
        }
        self.record("scenario", **what, **limits, **how, kinds=kinds, points=[], point_kinds=[], missing={})

    def record(self, op: str, *, t: float | None = None, **fields: object) -> None:
        """Append a line to the executor's own history."""
        line = json.dumps({"op": op, "t": time.time() if t is None else t, **fields})
        with (self.folder / "history" / "chaos.jsonl").open("a") as file:
            file.write(line + "\n")

    def _log(self) -> str:
        path = self.folder / "slurm.log"
        said = path.read_text(errors="replace").splitlines()[-15:] if path.exists() else []
        return "\n".join(["the end of its log:", *said])


def _named(members: list[Line]) -> dict[str, Any]:
    """Return what tells processes apart: their numbers on their hosts, and when they were born."""
    keys = {"pids": "pid", "hosts": "host", "born": "born"}
    return {name: [member[key] for member in members] for name, key in keys.items()}
