"""Check that the detector names processes that are really slowed, one after another, in real jobs.

The causes are busy programs on a rank's core, SIGSTOP for part of the time, a link that delays packets, and late rows,
which the task produces. No single job allows all of them, so there are two. In the first, two ranks compute, each on
its own core. In the second, three ranks sleep for most of a lane, as if waiting for a device, so they do not need a
core each; the last rank has its own network link. Each case draws the cause, the rank, the amount, and the number of
quiet steps beforehand.

The slowness starts with the first history row that shows it, because read-ahead hides late rows for a while. A report
is correct if it names the slow rank and the cause. Any other report about a rank, and any report during quiet steps, is
a false alarm.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import Effort
from benchmarks.insight.late_rows import ORDER
from benchmarks.recovery.jobs import TTL_S, write_live_job
from chaos.real.launch import launch
from chaos.scenario.model import Nodes, Scenario
from chaos.services.neighbours import Crowd
from chaos.services.network.namespace import Cable, NoNamespacesError, cable
from chaos.services.surroundings import Surroundings, folders
from chaos.services.torchrun_node import Node, signal_all
from elastic_train.insight.phases import PHASES, RankFacts
from rendezvous.etcd.server import EtcdServer

CASES, QUICK_CASES = 100, 8
QUIET_STEPS = 30
"""Steps after a case in which the detector has to forget it."""
QUIET_S, QUICK_QUIET_S = 600.0, 20.0
WITHIN_STEPS = 60
"""Steps from the start of a slowness after which it counts as missed."""
SEEN_WITHIN_STEPS = 300
"""Steps after which read-ahead is used up."""
START_S, STEP_S, LOOK_EVERY_S = 120.0, 30.0, 0.01
PERIOD_S = 0.02
TWO: dict[str, object] = {"max_tokens": 16, "dim": 64, "depth": 1, "heads": 2, "dropout": 0.1}
THREE = {**TWO, "max_tokens": 8, "dim": 16, "lane_ms": 15}
COLUMNS: Mapping[str, Callable[[RankFacts], float]] = {
    "slow_compute": lambda row: row.compute_s,
    "slow_data": lambda row: row.data_s,
    "slow_link": lambda row: row.round_trip_s,
}
LEAST_LATE_S = 0.002
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """A job of `num_nodes` nodes with one rank each; `laid` is the last one's cable, `keys` are its own settings."""

    name: str
    num_nodes: int
    params: dict[str, object]
    laid: Cable | None
    keys: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slowing:
    """A slowdown of a node: the expected kind of event, the method and the amount."""

    kind: str
    how: str
    node: int
    amount: float


@dataclass(slots=True)
class Tail:
    """The facts read from a job's histories: every rank's row per step, and the events, as rank 0 writes them."""

    folder: Path
    pids: dict[int, int] = field(default_factory=dict)
    rows: dict[int, list[RankFacts]] = field(default_factory=dict)
    events: list[Line] = field(default_factory=list)
    said_of_all: list[Line] = field(default_factory=list)
    """Events that concern no particular rank; `events` has the others."""
    standing: set[tuple[str, int]] = field(default_factory=set)
    """Reported slownesses of ranks that are not over."""
    step: int = 0
    _places: dict[Path, int] = field(default_factory=dict)

    def read(self) -> None:
        for path in sorted(self.folder.glob("history/[0-9]*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._places.get(path, 0))
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._places[path] = self._places.get(path, 0) + len(whole)
            for line in map(json.loads, whole.splitlines()):
                self._take(line)

    def _take(self, line: Line) -> None:
        if line["op"] == "form":
            self.pids[line["rank"]] = line["pid"]
        elif line["op"] == "phases":
            self.step = line["step"]
            self.rows[self.step] = [RankFacts._make(row) for row in line["seconds"]]
        elif line["op"] == "event" and line["of_rank"] is None:
            self.said_of_all.append(line)
        elif line["op"] == "event":
            self.events.append(line)
            (self.standing.discard if line["over"] else self.standing.add)((line["kind"], line["of_rank"]))

    def until(self, what: Callable[[], bool], timeout_s: float) -> None:
        """Read on until `what` returns True; raises SystemExit if no step comes for `timeout_s` seconds."""
        last, deadline = self.step, time.monotonic() + timeout_s
        while not what():
            time.sleep(LOOK_EVERY_S)
            self.read()
            if self.step != last:
                last, deadline = self.step, time.monotonic() + timeout_s
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.folder}: no step for {timeout_s:.0f} s; see node-*.log there")


@dataclass(frozen=True, slots=True)
class Running:
    """A running job, with the means to slow down its nodes."""

    tail: Tail
    nodes: Sequence[Node]
    points: Sequence[Path]
    laid: Cable | None

    def rank_of(self, node: int) -> int:
        own = set(self.nodes[node].pids())
        return next(rank for rank, pid in self.tail.pids.items() if pid in own)


@contextlib.contextmanager
def running(folder: Path, shape: Shape) -> Iterator[Running]:
    """Start a job, and yield it once it trains."""
    num_nodes, laid = shape.num_nodes, shape.laid
    task = {"path": "benchmarks.insight.late_rows:LateRows", "params": shape.params}
    keys: Mapping[str, object] = {
        "batch": {"global_batch": 64 * num_nodes, "micro_batch": 32},
        "checkpoint": {"every": "1000 steps"},
        **shape.keys,
    }
    config = write_live_job(folder, num_nodes, {"task": task, **keys})
    nodes = Nodes(count=num_nodes, min=num_nodes, max_restarts=0, lease_ttl_s=TTL_S, recovery="live")
    scenario = Scenario(name=folder.name, description="", config=config, nodes=nodes)
    around = Surroundings(cable=laid, points=folders(folder, num_nodes))
    with EtcdServer(host="0.0.0.0" if laid else "127.0.0.1") as server:
        endpoint = server.endpoint.replace("127.0.0.1", laid.address("etcd")) if laid else server.endpoint
        started = launch(scenario, endpoint, folder, ["--run.dir", str(folder)], folder.name, around)
        try:
            for node in started:
                node.start()
            tail = Tail(folder)
            tail.until(lambda: tail.step > 0 and len(tail.pids) == num_nodes, START_S)
            yield Running(tail, started, around.points, laid)
        finally:
            for node in started:
                node.kill()


@contextlib.contextmanager
def slowed(job: Running, what: Slowing) -> Iterator[None]:
    """Slow down a node during this context."""
    with contextlib.ExitStack() as undo:
        worker = job.tail.pids[job.rank_of(what.node)]
        if what.how == "crowd":
            undo.callback(Crowd([worker], round(what.amount)).leave)
        elif what.how == "stops":
            undo.enter_context(_stopping(worker, what.amount))
        elif what.how == "link":
            assert job.laid is not None, "it is drawn where there is one"
            job.laid.worsen(delay_s=what.amount)
            undo.callback(job.laid.mend)
        else:
            order = job.points[what.node] / ORDER
            order.write_text(str(1e3 * what.amount))
            undo.callback(order.unlink)
        yield


@contextlib.contextmanager
def _stopping(pid: int, share: float) -> Iterator[None]:
    """Stop a process for a share of each short period, like a CPU quota."""
    is_over = threading.Event()

    def stop() -> None:
        while not is_over.wait((1 - share) * PERIOD_S):
            signal_all([pid], signal.SIGSTOP)
            is_over.wait(share * PERIOD_S)
            signal_all([pid], signal.SIGCONT)

    thread = threading.Thread(target=stop, name="stops")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def drawn(draws: random.Random, shape: Shape) -> Slowing:
    """Draw a case's slowdown, large enough to make a step notably longer."""
    how = draws.choice(["link", "rows"] if shape.laid else ["crowd", "stops", "rows"])
    node = shape.num_nodes - 1 if how == "link" else draws.randrange(shape.num_nodes)
    kinds = {"crowd": "slow_compute", "stops": "slow_compute", "link": "slow_link", "rows": "slow_data"}
    amounts = {
        "crowd": draws.randint(1, 4),
        "stops": draws.uniform(0.4, 0.75),
        "link": draws.uniform(0.004, 0.02),
        "rows": draws.uniform(0.05, 0.15),
    }
    return Slowing(kinds[how], how, node, amounts[how])


@dataclass(slots=True)
class Found:
    """The results of the cases."""

    slow: int = 0
    right: int = 0
    wrong: int = 0
    latencies: list[int] = field(default_factory=list)

    def judge(self, job: Running, what: Slowing, struck_at: int, seen_at: int | None, before: int) -> str:
        """Judge the reports since a case began; return the result in words."""
        rank = job.rank_of(what.node)
        said = [line for line in job.tail.events[before:] if not line["over"]]
        good = [e for e in said if (e["kind"], e["of_rank"]) == (what.kind, rank) and e["step"] >= struck_at]
        self.slow += 1
        self.right += bool(good)
        self.wrong += len(said) - len(good)
        if good:
            self.latencies.append(max(0, good[0]["step"] - (seen_at or struck_at)))
        names = ", ".join(f"{e['kind']} of {e['of_rank']} at {e['step']}" for e in said)
        return f"{what.how} {what.amount:.2g} on rank {rank} from {struck_at}, seen {seen_at}: {names or 'nothing'}"


def _case(job: Running, found: Found, what: Slowing, quiet_steps: int) -> str:
    """Wait, slow down a node until that is reported or missed, and undo it."""
    tail, before = job.tail, len(job.tail.events)
    began = tail.step
    tail.until(lambda: tail.step >= began + quiet_steps, STEP_S)
    found.wrong += sum(not line["over"] for line in tail.events[before:])
    struck_at, before, rank = tail.step, len(tail.events), job.rank_of(what.node)
    usual = {step: tail.rows[step] for step in range(began + 1, struck_at + 1) if step in tail.rows}
    seen: list[int] = []

    def is_over() -> bool:
        if not seen:
            steps = range(struck_at + 1, tail.step)
            seen.extend(step for step in steps if all(_shows(tail, s, usual, what, rank) for s in (step, step + 1)))
        said = (what.kind, rank) in {(e["kind"], e["of_rank"]) for e in tail.events[before:] if not e["over"]}
        start = seen[0] + WITHIN_STEPS if seen else struck_at + SEEN_WITHIN_STEPS
        return said or tail.step > start

    with slowed(job, what):
        tail.until(is_over, STEP_S)
    text, before = found.judge(job, what, struck_at, seen[0] if seen else None, before), len(tail.events)
    _forget(job)
    found.wrong += sum(not line["over"] for line in tail.events[before:])
    return text


def _forget(job: Running) -> None:
    """Wait, with a limit, until all reports are over and quiet rows have filled the detector's window."""
    tail = job.tail
    let_go = tail.step

    def is_quiet() -> bool:
        passed = tail.step - let_go
        return passed >= QUIET_STEPS and (not tail.standing or passed >= SEEN_WITHIN_STEPS)

    tail.until(is_quiet, STEP_S)


def _shows(tail: Tail, step: int, usual: dict[int, list[RankFacts]], what: Slowing, rank: int) -> bool:
    """Return True if a step's row shows notably more of the slowed quantity than usual for that rank."""
    if step not in tail.rows or not usual:
        return False
    column = COLUMNS[what.kind]
    before = statistics.median(column(rows[rank]) for rows in usual.values())
    step_s = statistics.median(sum(rows[rank][: len(PHASES)]) for rows in usual.values())
    return column(tail.rows[step][rank]) > before + (LEAST_LATE_S if what.kind == "slow_link" else 0.1 * step_s)


def shapes(effort: Effort, undo: contextlib.ExitStack) -> list[Shape]:
    """Return both jobs; without namespaces, the job of three nodes has no slow link and is left out."""
    found = [Shape("two", 2, TWO, None)]
    try:
        laid = undo.enter_context(cable())
    except NoNamespacesError as error:
        effort.say(f"no slow links: {error}")
        return found
    return [*found, Shape("three", 3, THREE, laid)] if laid.relay is not None else found


def figures(effort: Effort) -> dict[str, object]:
    """Return precision and recall over the cases, and the most steps until a slowed rank was named."""
    found, num, by_how = Found(), QUICK_CASES if effort.is_quick else CASES, Counter[str]()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as undo:
        of = shapes(effort, undo)
        for shape in of:
            draws = random.Random(f"slowed/{shape.name}")
            with running(Path(folder) / shape.name, shape) as job:
                _forget(job)
                found.wrong += sum(not line["over"] for line in job.tail.events)
                for number in range(num // len(of)):
                    what = drawn(draws, shape)
                    by_how[what.how] += 1
                    effort.say(f"{shape.name} {number}: {_case(job, found, what, draws.randint(5, 30))}")
    return {
        "slowed_precision": round(found.right / max(1, found.right + found.wrong), 4),
        "slowed_recall": round(found.right / max(1, found.slow), 4),
        "slowed_latency_steps": max(found.latencies, default=0),
        "slowed_cases": {"all": found.slow, **by_how},
    }


def quiet_minutes(effort: Effort) -> dict[str, object]:
    """Return the number of reports about ranks while nothing was slowed."""
    seconds, num_said, num_steps = QUICK_QUIET_S if effort.is_quick else QUIET_S, 0, 0
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as undo:
        of = shapes(effort, undo)
        for shape in of:
            with running(Path(folder) / shape.name, shape) as job:
                until = time.monotonic() + seconds / len(of)
                job.tail.until(lambda until=until: time.monotonic() > until, STEP_S)  # type: ignore[misc]
                said = [line for line in job.tail.events if not line["over"]]
                num_said, num_steps = num_said + len(said), num_steps + job.tail.step
                effort.say(
                    f"{shape.name}: {job.tail.step} steps, {[(e['kind'], e['of_rank'], e['step']) for e in said]}"
                )
    return {"quiet_alarms": num_said, "quiet_steps": num_steps}
