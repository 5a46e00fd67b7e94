"""The memory of a run's ranks from their histories, and the snapshots of ranks that ran out of memory.

A history has a memory line now and then. Peaks only grow, so the last line suffices and only file ends are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_train.errors import ConfigError
from elastic_train.insight.phases import FOLDER, REST, MemoryFacts, memory_facts_of
from elastic_train.runs.lines import Line, number, text, whole
from elastic_train.system.wording import first_line
from elastic_train.tracking import history_files

TAIL_BYTES = 1 << 18
_SIGN = b'"op": "memory"'
MOST_TERMS = 5
"""Number of terms to search backwards for memory lines, which older versions did not write."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A rank's memory after a step."""

    rank: int
    step: int
    facts: MemoryFacts


@dataclass(frozen=True, slots=True)
class WorldMemory:
    """The memory of a term's ranks, by rank."""

    term: int
    ranks: Sequence[RankMemory]

    @property
    def most(self) -> int:
        return max(one.facts.peak for one in self.ranks)

    def as_json(self, hosts: Mapping[int, str]) -> dict[str, object]:
        ranks = [
            {"rank": one.rank, "on": hosts.get(one.rank), "step": one.step, **one.facts.as_fields()}
            | {REST: one.facts.rest}
            for one in self.ranks
        ]
        return {"term": self.term, "most": self.most, "ranks": ranks}


@dataclass(frozen=True, slots=True)
class RanOut:
    """A rank that ran out of memory: its position in the run, and the file with the details."""

    term: int
    rank: int
    host: str | None
    step: int | None
    lane: int | None
    file: str
    at: float = 0.0
    """Unix seconds of the failure."""

    def __str__(self) -> str:
        before = "on its way into it" if self.term else "before its first world"
        where = before if self.step is None else f"in step {self.step}"
        host = "" if self.host is None else f" on {self.host}"
        return f"rank {self.rank}{host} ran out of memory {where} (term {self.term}): {self.file} says what took it"


def memory_of(folder: Path) -> WorldMemory | None:
    """Return the memory of the newest term that recorded any."""
    terms = {history_files.term_of(path) for path in (folder / history_files.FOLDER).glob("[0-9]*-*-*.jsonl")}
    worlds = (WorldMemory(term, memory_in(folder, term)) for term in sorted(terms, reverse=True)[:MOST_TERMS])
    return next((world for world in worlds if world.ranks), None)


def memory_in(folder: Path, term: int) -> list[RankMemory]:
    paths = sorted((folder / history_files.FOLDER).glob(f"{term:08d}-*-*.jsonl"))
    parts: dict[int, list[Path]] = {}
    for path in paths:
        parts.setdefault(int(path.name.split("-")[1]), []).insert(0, path)
    found = [next(filter(None, (last_memory(rank, path) for path in newest)), None) for rank, newest in parts.items()]
    return [memory for memory in found if memory is not None]


def last_memory(rank: int, path: Path) -> RankMemory | None:
    """Return the last memory line of a rank's history; None without one."""
    try:
        content = history_files.tail_of(path, TAIL_BYTES)
    except FileNotFoundError:  # pruned meanwhile
        return None
    for written in reversed(content.splitlines()):
        if _SIGN in written:
            for line in history_files.lines_of(written):
                facts, step = memory_facts_of(line), whole(line, "step")
                if facts is not None and step is not None:
                    return RankMemory(rank, step, facts)
    return None


def read_plan(path: Path) -> Mapping[str, float]:
    """Return the bytes by component from `elastic-train plan --json`; raises ConfigError if the file is not a plan."""
    try:
        planned = json.loads(path.read_text())["own"]["memory_bytes"]
        return {str(part): float(num_bytes) for part, num_bytes in planned.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = first_line(error) if isinstance(error, OSError) else "it has no own.memory_bytes"
        raise ConfigError(
            f"--plan {path} is not a plan ({why}): write one with `elastic-train plan CONFIG --on CLUSTER --json`"
        ) from error


def ran_out_in(folder: Path) -> list[RanOut]:
    """Return the recorded ranks that ran out of memory, the oldest first."""
    found = [one for path in (folder / FOLDER).glob("*-*.json") if (one := _read(path)) is not None]
    return sorted(found, key=lambda one: (one.at, one.rank))


def _read(path: Path) -> RanOut | None:
    try:
        fields: Line = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    term, rank = (whole(fields, key) if isinstance(fields, dict) else None for key in ("term", "rank"))
    if term is None or rank is None:
        return None
    at = number(fields, "t") or 0.0
    return RanOut(term, rank, text(fields, "host"), whole(fields, "step"), whole(fields, "lane"), str(path), at)
