"""The story of a run, read from its folder: worlds with their steps, saves, phases and events.

It is read from rank 0's histories and the first lines of all others. Steps that a later world did not continue are
rolled back: a world's steps count up to the start of the later world. Times are unix seconds. A run may still be going,
may have failed, and may have no history; a history may be torn, shortened or deleted. Missing parts are counted and
cause no errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastic_train.errors import ConfigError
from elastic_train.runs.lines import Line, at, number, read_lines, text, whole
from elastic_train.tracking.history_files import FOLDER, histories, summary_of, term_of
from elastic_train.tracking.run_folder import CONFIG, existing_folder


@dataclass(frozen=True, slots=True)
class Applied:
    """A step that a world applied, from its first line; the loss is None if it is not a number."""

    at: float
    step: int
    loss: float | None
    num_samples: int
    seconds: float
    """Since the previous step, validation or restore, without the time of validations."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A published commit: its duration in `seconds`, and how long training waited for it."""

    at: float
    step: int
    seconds: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class Phases:
    """The time of every rank over the `steps` steps up to `step`: rows of RankFacts, by rank."""

    step: int
    steps: int
    rows: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Noticed:
    """An event: a problem began or, with `is_over`, ended."""

    at: float
    kind: str
    step: int
    since: int
    rank: int | None
    host: str | None
    value: float | None
    usual: float | None
    unit: str
    is_over: bool


@dataclass(frozen=True, slots=True)
class World:
    """One term: steps (lo, hi] were applied, and those beyond `cut` were rolled back by a later term."""

    term: int
    size: int
    cause: str
    started_at: float
    """Start of rank 0's process."""
    formed_at: float
    restored_at: float
    ended_at: float
    """Time of rank 0's last line."""
    lo: int
    cut: int
    steps: Sequence[Applied] = field(repr=False, default=())
    saves: Sequence[Saved] = field(repr=False, default=())
    phases: Sequence[Phases] = field(repr=False, default=())
    events: Sequence[Noticed] = field(repr=False, default=())
    hosts: Mapping[int, str] = field(repr=False, default_factory=dict)
    resumed: Mapping[str, object] = field(repr=False, default_factory=dict)
    validation_s: float = 0.0
    status: str | None = None
    """End of rank 0's process: done, preempted, left, closed; None if not recorded."""

    @property
    def hi(self) -> int:
        return self.steps[-1].step if self.steps else self.lo

    @property
    def kept(self) -> list[Applied]:
        return [step for step in self.steps if step.step <= self.cut]

    @property
    def given_up(self) -> list[Applied]:
        return [step for step in self.steps if step.step > self.cut]


@dataclass(frozen=True, slots=True)
class Story:
    """A run's worlds, the oldest first; the histories of `num_pruned` terms are deleted."""

    folder: Path
    worlds: Sequence[World]
    num_pruned: int = 0
    pruned_s: float = 0.0
    """Seconds that the deleted terms trained."""

    @property
    def began(self) -> float:
        return min(self.worlds[0].started_at, self.worlds[0].formed_at) if self.worlds else 0.0

    @property
    def ended(self) -> float:
        return max((world.ended_at for world in self.worlds), default=0.0)

    @property
    def step(self) -> int:
        return self.worlds[-1].hi if self.worlds else 0

    @property
    def kept(self) -> list[Applied]:
        return [step for world in self.worlds for step in world.kept]


def read_story(folder: str | Path) -> Story:
    """Read a run's folder; raises ConfigError if it is not one. Without histories, the story has no worlds."""
    path = existing_folder(folder)
    if not (path / CONFIG).is_file() and not (path / FOLDER).is_dir():
        raise ConfigError(f"{folder} is not a run's folder: it has neither {CONFIG} nor {FOLDER}/; name a run.dir")
    hosts = _hosts(path)
    read = [world for parts in histories(path, 0) if (world := _world(parts, hosts)) is not None]
    worlds = _cut(_placed(sorted(read, key=lambda world: (world.term, world.formed_at))))
    summary = summary_of(path)
    return Story(path, worlds, summary.pruned, summary.trained_s if summary.pruned else 0.0)


def _placed(worlds: Sequence[World]) -> list[World]:
    """Give a world that ended before it had a state, e.g. a refused one, the last step of the world before it."""
    placed = list[World]()
    for world in worlds:
        placed.append(world if world.lo >= 0 else replace(world, lo=placed[-1].hi if placed else 0))
    return placed


def _cut(worlds: Sequence[World]) -> list[World]:
    """Cut each world's steps where a later world started that did not continue them."""
    cut, least = list[World](), float("inf")
    for world in reversed(worlds):
        hi = world.steps[-1].step if world.steps else world.lo
        cut.append(replace(world, cut=int(min(hi, least))))
        least = min(least, world.lo)
    return cut[::-1]


def _world(parts: Sequence[Path], hosts: Mapping[int, Mapping[int, str]]) -> World | None:
    """Read one history of rank 0; None if it lacks the line of the world's formation."""
    lines = [line for part in parts for line in read_lines(part)]
    form = next((line for line in lines if line["op"] == "form"), None)
    if form is None:
        return None
    restore: Line = next((line for line in lines if line["op"] == "restore"), {})
    term, formed_at = whole(form, "term") or term_of(parts[0]), at(form)
    restored_at = at(restore) if restore else formed_at
    resumed = restore.get("resumed")
    steps, validation_s = _steps(lines, restored_at)
    return World(
        term=term,
        size=whole(form, "world") or 1,
        cause=text(form, "cause") or "start",
        started_at=number(form, "started_at") or formed_at,
        formed_at=formed_at,
        restored_at=restored_at,
        ended_at=max(at(line) for line in lines),
        lo=whole(restore, "step") or 0 if restore else steps[0].step - 1 if steps else -1,
        cut=0,
        steps=steps,
        saves=[saved for line in lines if line["op"] == "commit" and (saved := saved_of(line))],
        phases=[row for line in lines if line["op"] == "phases" and (row := phases_of(line))],
        events=[event for line in lines if line["op"] == "event" and (event := event_of(line))],
        hosts=hosts.get(term, {}),
        resumed=resumed if isinstance(resumed, dict) else {},
        validation_s=validation_s,
        status=next((text(line, "status") for line in reversed(lines) if line["op"] == "end"), None),
    )


def _steps(lines: Sequence[Line], restored_at: float) -> tuple[list[Applied], float]:
    """Return a world's steps with their durations, and the total seconds of its validations.

    A validation's line has its start. It ends when the next step begins, which has no line of its own, so that step is
    assumed to take the median time.
    """
    steps, gaps, validated = list[Applied](), list[float](), set[int]()
    last, is_validated = restored_at, False
    for line in lines:
        if line["op"] == "validate":
            is_validated = True
        step = whole(line, "step") if line["op"] == "step" and not line.get("pending") else None
        if step is None or (steps and step <= steps[-1].step):
            continue
        if is_validated or not steps:
            validated.add(len(steps))
        seconds, last, is_validated = max(0.0, at(line) - last), at(line), False
        steps.append(Applied(last, step, number(line, "loss"), whole(line, "num_samples") or 0, seconds))
        gaps.append(seconds)
    usual = sorted(gap for place, gap in enumerate(gaps) if place not in validated)
    median = usual[len(usual) // 2] if usual else float("inf")
    validation_s = sum(max(0.0, gaps[place] - median) for place in validated if place)
    shortened = (
        replace(step, seconds=min(step.seconds, median)) if place in validated else step
        for place, step in enumerate(steps)
    )
    return list(shortened), validation_s


def saved_of(line: Line) -> Saved | None:
    step, seconds, stall_s = whole(line, "step"), number(line, "seconds"), number(line, "stall_s")
    if step is None or seconds is None or stall_s is None:
        return None
    return Saved(number(line, "created_at") or at(line), step, seconds, stall_s)


def phases_of(line: Line) -> Phases | None:
    step, steps, rows = whole(line, "step"), whole(line, "steps"), line.get("seconds")
    if step is None or not steps or not isinstance(rows, list) or not rows:
        return None
    is_sound = all(isinstance(row, list) and len(row) >= 10 and len(row) == len(rows[0]) for row in rows)
    return Phases(step, steps, rows) if is_sound else None


def event_of(line: Line) -> Noticed | None:
    kind, step, since = text(line, "kind"), whole(line, "step"), whole(line, "since")
    if kind is None or step is None or since is None:
        return None
    return Noticed(
        at=at(line),
        kind=kind,
        step=step,
        since=since,
        rank=whole(line, "of_rank"),
        host=text(line, "host"),
        value=number(line, "value"),
        usual=number(line, "usual"),
        unit=text(line, "unit") or "",
        is_over=bool(line.get("over")),
    )


def _hosts(folder: Path) -> dict[int, dict[int, str]]:
    """Return the host of every rank by term, from the first lines of all histories."""
    hosts: dict[int, dict[int, str]] = {}
    for path in sorted((folder / FOLDER).glob("[0-9]*-*-*.jsonl")):
        form = next(_first(path), {})
        term, rank, host = whole(form, "term"), whole(form, "rank"), text(form, "host")
        if term is not None and rank is not None and host is not None:
            hosts.setdefault(term, {})[rank] = host
    return hosts


def _first(path: Path) -> Iterator[Line]:
    return (line for line in read_lines(path) if line["op"] == "form")
