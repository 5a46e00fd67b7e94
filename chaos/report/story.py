"""The story of a run for its report: steps applied and rolled back, commits published, and the cost of faults.

Everything is read from the evidence and the verdict; times are seconds since the run's first line.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.judge.evidence.applied import branch_of, furthest_of, restored_at
from chaos.judge.evidence.recovery_cost import Recovery
from chaos.judge.evidence.run_files import Evidence, Line, whole
from chaos.judge.findings import Unknown, Violated
from chaos.report.lanes import Lane, lanes_of
from chaos.report.reading import Reader, is_number, time_of


@dataclass(frozen=True, slots=True)
class Applied:
    """A step's first line in its term; the loss may be NaN."""

    at: float
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Branch:
    """The steps (lo, hi] that one term applied; a later term rolled back (cut, hi]."""

    term: int
    world: int
    formed_at: float
    lo: int
    cut: int
    hi: int
    steps: Sequence[Applied] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Published:
    """A commit: its time, its step, and if the final state descends from it."""

    at: float
    step: int
    term: int
    key: str
    is_kept: bool


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault: kind, place and time, and the cost of its recovery if the run recovered."""

    at: float
    kind: str
    point: str
    node: int | None
    step: int | None
    cost: Recovery | None

    @property
    def until(self) -> float:
        return self.at + (self.cost.rto_s if self.cost else 0.0)

    @property
    def name(self) -> str:
        where = f" on node {self.node}" if self.node is not None else ""
        return f"{self.kind}{f' at {self.point}' if self.point else ''}{where}"


@dataclass(frozen=True, slots=True)
class Story:
    """The whole story; `began` is in unix seconds."""

    began: float
    until: float
    branches: list[Branch]
    commits: list[Published]
    lanes: list[Lane]
    faults: list[Struck]
    num_left_out: int

    @property
    def furthest(self) -> int:
        """The furthest step that any term applied, at least 1."""
        return max([1, *(branch.hi for branch in self.branches)])


def story_of(reader: Reader, recoveries: Sequence[Recovery] = ()) -> Story:
    """Build a run's story, even from incomplete histories."""
    branches = _branches(reader)
    faults = _faults(reader, recoveries)
    lanes, commits = lanes_of(reader), _commits(reader, branches)
    return Story(reader.began, reader.ended - reader.began, branches, commits, lanes, faults, reader.num_left_out)


def _branches(reader: Reader) -> list[Branch]:
    formed, restored = _first(reader.of("form", "term", "world")), _first(reader.of("restore", "term", "step"))
    steps: dict[int, dict[int, Applied]] = defaultdict(dict)
    for line in reader.of("step", "term", "step"):
        applied = Applied(reader.at(line), whole(line, "step"), _loss(line))
        steps[whole(line, "term")].setdefault(applied.step, applied)
    branches: list[Branch] = []
    kept = _kept(reader.run)
    cut: float = math.inf
    for term in sorted({*restored, *steps}, reverse=True):
        own = sorted(steps[term].values(), key=lambda applied: applied.step)
        lo = whole(restored[term], "step") if term in restored else own[0].step - 1
        hi = max(lo, own[-1].step) if own else lo
        first = formed.get(term) or restored.get(term)
        formed_at, world = (reader.at(first) if first else own[0].at), formed.get(term, {}).get("world")
        size = world if isinstance(world, int) else 0
        until = cut if kept is None else kept.get(term, lo)
        branches.append(Branch(term, size, formed_at, lo, int(min(hi, max(lo, until))), hi, own))
        cut = min(cut, lo)
    return branches[::-1]


def _kept(run: Evidence) -> dict[int, int] | None:
    """Return the last step of each term in the lineage that the last term continues, by the judge's rules.

    None if the histories are too torn: then each term is assumed to roll back everything after its first step.
    """
    try:
        last = max(restored_at(run), default=None)
        if last is None:
            return None
        until = furthest_of(run).get(last, whole(restored_at(run)[last], "step"))
        return {term: hi for term, _, hi in branch_of(run, last, until)}
    except (Violated, Unknown, LookupError, TypeError, ValueError, AttributeError):
        return None


def _first(lines: list[Line]) -> dict[int, Line]:
    return {whole(line, "term"): line for line in reversed(lines)}


def _commits(reader: Reader, branches: list[Branch]) -> list[Published]:
    cuts = {branch.term: branch.cut for branch in branches}
    commits = []
    for line in reader.of("commit", "step", "term"):
        step, term = whole(line, "step"), whole(line, "term")
        commits.append(Published(reader.at(line), step, term, str(line.get("key")), step <= cuts.get(term, -1)))
    return commits


def _faults(reader: Reader, recoveries: Sequence[Recovery]) -> list[Struck]:
    costs = {(cost.at, cost.kind): cost for cost in recoveries}
    faults = []
    for line in reader.of("fault"):
        kind, _, point = str(line.get("kind")).partition("@")
        node, step = line.get("node"), line.get("seen_step")
        faults.append(
            Struck(
                at=reader.at(line),
                kind=kind,
                point=str(line.get("point") or point),
                node=node if isinstance(node, int) else None,
                step=step if isinstance(step, int) else None,
                cost=costs.get((time_of(line), str(line.get("kind")))),
            )
        )
    return faults


def _loss(line: Line) -> float:
    loss = line.get("loss")
    return float(str(loss)) if is_number(loss) else math.nan
