"""Watch a job whose script does not use our package, and write its histories in our format.

A worker is a process with a rank from torchrun. Workers with the same world size and store, and distinct ranks, form
one world. Restarts start all workers anew, so a duplicate rank or a dead member starts the next world; worlds are
numbered in order.

Lines of the hook become steps. A world is assumed to have resumed just below its first applied step.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos.errors import RunError, ScenarioError
from chaos.judge.evidence.run_files import Line
from chaos.judge.verdict import FAULTED, REFERENCE, Verdict, examine
from chaos.real.history_tail import Followed
from chaos.real.job import Job
from chaos.real.runs import clear, undoable
from chaos.scenario.kinds import BY_TASKS, KINDS, PROXIED
from chaos.scenario.model import Scenario
from chaos.scenario.schedule import Due, schedule
from chaos.script.nodes import SPOOL, check, nodes_of, uses_etcd
from chaos.services.surroundings import surroundings
from chaos.services.torchrun_node import Node
from rendezvous.process_table import environ_of, is_alive, stat_of

SCAN_EVERY_S = 0.2
"""Workers live much longer than this; each scan reads /proc of every process on the machine."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A process started by torchrun: its node, rank, world size and start time (unix seconds)."""

    pid: int
    node: int
    rank: int
    world: int
    store: str
    started_at: float


@dataclass(slots=True)
class World:
    """Workers that train together; `begun_at` is the step they resumed from, None before the first applied step."""

    term: int
    size: int
    store: str
    workers: dict[int, Worker] = field(default_factory=dict)
    begun_at: int | None = None
    reached: int = 0

    def takes(self, worker: Worker) -> bool:
        """Return True if a new worker belongs to this world: its rank is free, and all workers are still alive."""
        is_alike = (worker.world, worker.store) == (self.size, self.store) and worker.rank not in self.workers
        return is_alike and all(is_alive(other.pid) for other in self.workers.values())


class Watcher:
    """Converts the observed processes of a job and the lines of their hooks into history lines."""

    def __init__(self, folder: Path, nodes: Sequence[Node], command: str) -> None:
        self._folder, self._nodes = folder, nodes
        self._worlds: list[World] = []
        self._placed: dict[int, tuple[World, Worker]] = {}
        self._read: dict[Path, int] = {}
        self._num_samples: int | None = None
        self._scan_at = 0.0
        (folder / "history").mkdir(parents=True, exist_ok=True)
        self._append("script.jsonl", {"op": "script", "t": time.time(), "command": command})

    def look(self, _: Followed) -> None:
        """Process the events since the last call; scans for processes every SCAN_EVERY_S."""
        if time.monotonic() >= self._scan_at:
            for worker in sorted(self._new_workers(), key=lambda worker: worker.started_at):
                self._place(worker)
            self._scan_at = time.monotonic() + SCAN_EVERY_S
        self._take_lines()

    def finish(self) -> None:
        """Write the job's result, and the ends of workers whose agent exited with 0."""
        self._take_lines()
        good = {node.number for node in self._nodes if node.code == 0}
        for world in self._worlds[-1:]:
            for worker in world.workers.values():
                if worker.node in good:
                    self._write(world, worker, "end", time.time(), status="done", step=world.reached)
        unseen = [path for path in (self._folder / SPOOL).glob("*.jsonl") if int(path.stem) not in self._placed]
        if unseen:
            why = f"process {unseen[0].stem} logged steps, but was not seen while it lived"
            self._append("script.jsonl", {"op": "unseen", "t": time.time(), "why": why})
        trained = [world for world in self._worlds if world.begun_at is not None] or [World(0, 0, "")]
        place = {"step": trained[-1].reached, "term": trained[-1].term, "num_samples": self._num_samples}
        result = {"status": "done" if good else "failed", **place}
        (self._folder / "result.json").write_text(json.dumps(result) + "\n")

    def _new_workers(self) -> Iterator[Worker]:
        for node in self._nodes:
            for pid in node.pids():
                if pid not in self._placed and (worker := worker_of(pid, node.number)) is not None:
                    yield worker

    def _place(self, worker: Worker) -> None:
        world = self._worlds[-1] if self._worlds else None
        if world is None or not world.takes(worker):
            world = World(len(self._worlds) + 1, worker.world, worker.store)
            self._worlds.append(world)
        world.workers[worker.rank] = worker
        self._placed[worker.pid] = (world, worker)
        at, first = worker.started_at, next(iter(world.workers.values()))
        times = {"joined_at": None, "sealed_at": first.started_at, "started_at": at}
        cause = "start" if world.term == 1 else "restart"
        self._write(world, worker, "form", at, world=worker.world, pid=worker.pid, cause=cause, **times)

    def _take_lines(self) -> None:
        for line, path in sorted(self._new_lines(), key=lambda item: float(str(item[0]["t"]))):
            self._take(line, int(path.stem))

    def _take(self, line: Line, pid: int) -> None:
        """Write a step logged by a hook, preceded by a restore line if it is the world's first."""
        world, worker = self._placed[pid]
        step, epoch, at = int(str(line["step"])), line["epoch"], float(str(line["t"]))
        if world.begun_at is None:
            world.begun_at = step - 1
            place = {"step": step - 1, "epoch": epoch, "offset": None, "commit": None, "given_by": None}
            formed = max(other.started_at for other in world.workers.values())
            self._write(world, worker, "restore", formed, **place, seconds=None, skipped=[], resumed=None)
        world.reached = max(world.reached, step)
        self._num_samples = int(str(line["of"]))
        ids, loss = line["ids"], line["loss"]
        assert isinstance(ids, list), "the hook writes a list"
        what = {"num_samples": len(ids), "loss": math.nan if loss is None else loss, "ids": ids, "of": line["of"]}
        self._write(world, worker, "step", at, step=step, epoch=epoch, world=world.size, **what)

    def _new_lines(self) -> Iterator[tuple[Line, Path]]:
        """Yield the complete lines of known workers; an incomplete last line is left for the next call."""
        for path in (self._folder / SPOOL).glob("*.jsonl"):
            if int(path.stem) not in self._placed:
                continue
            place = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(place)
                content = file.read()
            end = content.rfind(b"\n") + 1
            self._read[path] = place + end
            for text in content[:end].splitlines():
                yield json.loads(text), path

    def _write(self, world: World, worker: Worker, op: str, t: float, /, **fields: object) -> None:
        name = f"{world.term:08d}-{worker.rank:05d}-{worker.pid}.jsonl"
        self._append(name, {"op": op, "t": t, "term": world.term, "rank": worker.rank, **fields})

    def _append(self, name: str, line: Line) -> None:
        with (self._folder / "history" / name).open("a") as file:
            file.write(json.dumps(line) + "\n")


def worker_of(pid: int, node: int) -> Worker | None:
    """Return the worker with this process id; None without its own rank: data loaders inherit their parent's."""
    environ, stat = environ_of(pid), stat_of(pid)
    is_ranked = environ.keys() >= {"RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"}
    if stat is None or not is_ranked or "RANK" in environ_of(stat.parent):
        return None
    # Rounded up to the next tick: rounded down, a process could seem older than the fault that it followed.
    started_at = booted_at() + (stat.born + 1) / os.sysconf("SC_CLK_TCK")
    store = f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
    return Worker(pid, node, int(environ["RANK"]), int(environ["WORLD_SIZE"]), store, started_at)


def booted_at() -> float:
    """Return the boot time in unix seconds; a delay between reading the two clocks only makes it too early."""
    return max(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) for _ in range(10))


DEFAULT = "any-script"
"""The scenario of a command without one."""

Say = Callable[[str], None]


def execute(command: str, scenario: Scenario, seed: int, folder: Path, *, replay: str, say: Say) -> Verdict:
    """Run a command with the scenario's faults and, separately, without; write and return the verdict.

    A job that does not finish is a finding, not an error, as it is the user's. Raises ScenarioError for an unusable
    command or scenario.
    """
    check(command)
    due = _settle(scenario, seed, uses_etcd(command))
    say(f"scenario {scenario.name}, {scenario.nodes.count} nodes: {', '.join(f'{f.kind} {f.target}' for f in due)}")
    clear(folder)
    for name in [FAULTED, REFERENCE] if scenario.reference else [FAULTED]:
        say(f"{'with' if name == FAULTED else 'the same without'} faults, in {folder / name}")
        _run_once(command, scenario, due if name == FAULTED else [], seed, folder / name, replay, say)
    return examine(folder)


def _settle(scenario: Scenario, seed: int, has_etcd: bool) -> list[Due]:
    problems = [*(_unfit(fault.kind, has_etcd) for fault in scenario.faults), *undoable(scenario)]
    if scenario.soak is not None:
        problems.append("a soak is for our own trainer: list the faults of a script")
    if scenario.own_data:
        problems.append("own_data is for our own trainer: what a script reads is not known")
    if any(fault.within for fault in scenario.faults):
        problems.append("how long a script runs is not known: say at_step or after_s, not within")
    if found := [problem for problem in problems if problem is not None]:
        raise ScenarioError(*(f"{scenario.name}: {problem}" for problem in found))
    return schedule(scenario, seed, total_steps=sys.maxsize, commit_every=sys.maxsize)


def _unfit(kind: str, has_etcd: bool) -> str | None:
    """Return why a kind of fault cannot be applied to a user's script; None if it can."""
    if kind in BY_TASKS:
        return f"{kind} is for our own trainer: a task of chaos.tasks does it"
    if KINDS[kind].aim in ("point", "storage", "tracker", "data") or kind in ("start_twin", "readonly_dir"):
        known = "no failpoints, commits, tracker, data or second launch that we know"
        return f"{kind} is for our own trainer: a script has {known}"
    if (KINDS[kind].aim == "etcd" or kind in PROXIED or kind == "lose_lease") and not has_etcd:
        return f"{kind} needs etcd: put --rdzv-backend=etcd into the command, without an endpoint"
    return None


def _run_once(
    command: str, scenario: Scenario, due: Sequence[Due], seed: int, folder: Path, replay: str, say: Say
) -> None:
    run_id, kinds = f"{scenario.name}-{folder.name}", [fault.kind for fault in due]
    folder.mkdir(parents=True)
    with surroundings(folder, run_id, kinds, scenario) as around:
        if absent := [f"{kind} cannot be done here: {why}" for kind, why in around.missing.items() if kind in kinds]:
            raise ScenarioError(*(f"{scenario.name}: {problem}" for problem in absent))
        nodes = nodes_of(command, scenario.nodes, folder, run_id, around)
        watcher = Watcher(folder, nodes, command)
        try:
            Job(folder, nodes, scenario, list(due), seed, watcher.look, say, replay, around).run()
        except RunError as error:
            say(f"{folder.name}: {error}")
        finally:
            watcher.finish()
