"""The current state of a run: the newest world, its ranks with their last window of phases, and recent events.

Cheap enough to redraw every second or two, whatever the length of the histories: reads the first lines of each rank's
file and the end of rank 0's for the newest term, and the beginnings of rank 0's files for earlier terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path

from elastic_train.errors import ConfigError
from elastic_train.insight.phases import PHASES, read_utilisation
from elastic_train.runs.lines import Line, at, number, read_lines, text, whole
from elastic_train.runs.memory import memory_in
from elastic_train.runs.story import Noticed, Phases, Saved, event_of, phases_of, saved_of
from elastic_train.system.wording import counted
from elastic_train.tracking.history_files import FOLDER, histories, lines_of, tail_of, term_of
from elastic_train.tracking.run_folder import CONFIG, RunFolder

TAIL_BYTES = 1 << 20
"""Bytes read from the end of rank 0's newest history; a line of phases has 100 bytes per rank."""
MOST_WORLDS, MOST_RECENT = 20, 10
RATE_STEPS = 20
MOST_LOOKED_AT = 64
"""Largest world for which the end of every rank's history is read for its memory."""


@dataclass(frozen=True, slots=True)
class Glance:
    """The known facts; None means not known (yet). Times are unix seconds."""

    run: str
    status: str | None
    """From result.json, unless it is older than the newest world."""
    term: int | None = None
    size: int = 0
    step: int | None = None
    loss: float | None = None
    step_s: float | None = None
    samples_per_s: float | None = None
    mfu: float | None = None
    last_at: float | None = None
    num_worlds: int = 0
    commit: Saved | None = None
    hosts: Mapping[int, str] = field(default_factory=dict)
    phases: Phases | None = None
    memory: Mapping[int, int] = field(default_factory=dict)
    """Peak bytes by rank; empty for more than MOST_LOOKED_AT ranks."""
    waiting: str | None = None
    """The reason why the newest world did not form, if later than the last line."""
    recent: Sequence[tuple[float, str]] = ()
    """Recent events, the newest last."""

    def phase_ms(self, rank: int) -> dict[str, float]:
        """Return a rank's milliseconds per step by phase in the last window."""
        assert self.phases is not None, "asked where there is a window"
        row = self.phases.rows[rank]
        return {phase: 1e3 * row[place] / self.phases.steps for place, phase in enumerate(PHASES)}

    def as_json(self) -> dict[str, object]:
        numbers = range(len(self.phases.rows)) if self.phases is not None else range(0)
        ranks = [
            {"rank": rank, "host": self.hosts.get(rank), "ms": self.phase_ms(rank), "memory": self.memory.get(rank)}
            for rank in numbers
        ]
        return {
            "run": self.run,
            "status": self.status,
            "term": self.term,
            "world": self.size,
            "step": self.step,
            "loss": self.loss,
            "step_s": self.step_s,
            "samples_per_s": self.samples_per_s,
            "mfu": self.mfu,
            "last_at": self.last_at,
            "worlds": self.num_worlds,
            "commit_step": self.commit.step if self.commit else None,
            "waiting": self.waiting,
            "ranks": ranks,
            "recent": [{"t": at, "what": what} for at, what in self.recent],
        }


def look(run: str | Path) -> Glance:
    """Read the current state from a run's folder; raises ConfigError if it is not one."""
    folder = Path(run)
    if not folder.is_dir() or not ((folder / CONFIG).is_file() or (folder / FOLDER).is_dir()):
        raise ConfigError(f"{run} is not a run's folder: it has neither {CONFIG} nor {FOLDER}/; name a run.dir")
    parts = histories(folder, 0)
    if not parts:
        return Glance(str(run), _status(folder, 0), waiting=_unformed(folder, 0.0))
    newest = parts[-1]
    term, head, tail = term_of(newest[-1]), _head(newest[-1]), _tail(newest[-1])
    form = next((line for line in head if line["op"] == "form"), {})
    steps = [line for line in tail if line["op"] == "step" and not line.get("pending")]
    last_at = max((at(line) for line in (*head, *tail)), default=None)
    lasted = [at(after) - at(before) for before, after in pairwise(steps)][-RATE_STEPS:]
    step_s = sorted(lasted)[len(lasted) // 2] if lasted else None
    last: Line = steps[-1] if steps else {}
    size, known = whole(form, "world") or 0, read_utilisation(folder)
    rate = (whole(last, "num_samples") or 0) / step_s if step_s else None
    return Glance(
        run=str(run),
        status=_status(folder, term),
        term=term,
        size=size,
        step=whole(last or next((line for line in head if line["op"] == "restore"), {}), "step"),
        loss=number(last, "loss"),
        step_s=step_s,
        samples_per_s=rate,
        mfu=None if known is None or rate is None or not size else known.mfu(rate, size),
        last_at=last_at,
        num_worlds=len({term_of(each[0]) for each in parts}),
        commit=next((found for line in reversed(tail) if line["op"] == "commit" and (found := saved_of(line))), None),
        hosts=_hosts(folder, term),
        phases=next((row for line in reversed(tail) if line["op"] == "phases" and (row := phases_of(line))), None),
        memory={one.rank: one.facts.peak for one in memory_in(folder, term)} if size <= MOST_LOOKED_AT else {},
        waiting=_unformed(folder, last_at or 0.0),
        recent=_recent([_head(each[0]) for each in parts[-MOST_WORLDS:]], [*tail, *_noted(folder, "unfit")]),
    )


def _head(path: Path) -> list[Line]:
    return list(islice(read_lines(path), 2))


def _tail(path: Path) -> list[Line]:
    """Return the lines at the end of a history, without the first one, which may be truncated."""
    try:
        content = tail_of(path, TAIL_BYTES)
    except FileNotFoundError:  # pruned meanwhile
        return []
    return [line for line in lines_of(content) if number(line, "t") is not None]


def _recent(heads: Sequence[Sequence[Line]], tail: Sequence[Line]) -> list[tuple[float, str]]:
    """Return worlds, events, commits and the end, in words."""
    found = [(at(line), _world_in_words(line)) for head in heads for line in head if line["op"] == "form"]
    for line in tail:
        if line["op"] == "event" and (event := event_of(line)) is not None:
            found.append((event.at, _event_in_words(event)))
        elif line["op"] == "commit" and (saved := saved_of(line)) is not None:
            found.append(
                (at(line), f"commit of step {saved.step}, {saved.seconds:.1f} s, waited {saved.stall_s:.2f} s")
            )
        elif line["op"] == "unfit":
            found.append((at(line), f"left out: {text(line, 'why')}"))
        elif line["op"] == "end":
            found.append((at(line), f"end: {text(line, 'status')} after step {whole(line, 'step')}"))
    return sorted(found)[-MOST_RECENT:]


def _world_in_words(line: Line) -> str:
    return f"term {whole(line, 'term')}: {counted(whole(line, 'world') or 0, 'rank')} ({text(line, 'cause')})"


def _event_in_words(event: Noticed) -> str:
    who = "" if event.rank is None else f" rank {event.rank}{f' on {event.host}' if event.host else ''}"
    if event.is_over:
        return f"resolved: {event.kind}{who}, since step {event.since}"
    measured = "" if event.value is None else f": {event.value:.3g} {event.unit} against {event.usual or 0.0:.3g}"
    return f"EVENT {event.kind}{who}{measured}, since step {event.since}"


def _hosts(folder: Path, term: int) -> dict[int, str]:
    hosts = {}
    for path in (folder / FOLDER).glob(f"{term:08d}-*.jsonl"):
        form = next((line for line in _head(path) if line["op"] == "form"), {})
        rank, host = whole(form, "rank"), text(form, "host")
        if rank is not None and host is not None:
            hosts[rank] = host
    return dict(sorted(hosts.items()))


def _status(folder: Path, term: int) -> str | None:
    """Return how the run ended; None if a newer term has begun since."""
    try:
        result = RunFolder(folder).result() or {}
    except ConfigError:
        return None  # being written, or damaged: the histories have the facts
    return text(result, "status") if (whole(result, "term") or term) >= term else None


def _unformed(folder: Path, after: float) -> str | None:
    """Return the reason why the newest world did not form, if noted later than `after`."""
    last = max(_noted(folder, "unformed"), key=at, default=None)
    return None if last is None or at(last) <= after else text(last, "why")


def _noted(folder: Path, what: str) -> list[Line]:
    """Return the last lines of notes written outside any world."""
    return [line for path in (folder / FOLDER).glob(f"{what}-*.jsonl") for line in _tail(path)]
