"""Which process a line is about: pids are not unique, since containers count their own, and machines use them again.

A process is (host, boot, pid, born), as the `form` lines of histories say. Lines of the executor name pids, and beside
them, where it knows, `hosts` and `born`; where it does not, the process that was seen last by then is meant. So that
nothing else in the judge has to know, every process gets a number of its own here: the first of a pid keeps that, the
n-th after it is pid + n * AGAIN.

Lines of older versions say nothing of it; one pid is one process then.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

Line = dict[str, object]
AGAIN = 10_000_000
"""More than any pid: Linux has none above 4,194,304."""
ANY = object()


@dataclass(frozen=True, slots=True)
class Identity:
    """What is known of a process; None where a line does not say."""

    pid: int
    host: object = None
    boot: object = None
    born: object = None

    def may_be(self, other: Identity) -> bool:
        """Say whether nothing that both say differs."""
        return (
            self.pid == other.pid
            and (self.host is None or other.host is None or self.host == other.host)
            and (self.boot is None or other.boot is None or self.boot == other.boot)
            and (self.born is None or other.born is None or self.born == other.born)
        )


@dataclass(slots=True)
class _Known:
    """The processes of each pid, with their numbers, and when each was first seen."""

    numbers: dict[Identity, int] = field(default_factory=dict)
    seen_at: dict[Identity, float] = field(default_factory=dict)
    alike: dict[tuple[object, ...], list[Identity]] = field(default_factory=lambda: defaultdict(list))
    """By pid, host and time of birth, each of the two as it was said, and under ANY."""

    def number(self, identity: Identity, at: float) -> int:
        """Return the number of the process that a line means; a new one if there is none that it may be."""
        alike = [known for key in self._meant(identity) for known in self.alike.get(key, ()) if identity.may_be(known)]
        if not alike:
            self.numbers[identity] = identity.pid + AGAIN * len(self.alike[identity.pid, ANY, ANY])
            for key in product((identity.pid,), (identity.host, ANY), (identity.born, ANY)):
                self.alike[key].append(identity)
            self.seen_at[identity] = at
            return self.numbers[identity]
        before = [known for known in alike if self.seen_at[known] <= at]
        meant = max(before, key=self.seen_at.__getitem__) if before else min(alike, key=self.seen_at.__getitem__)
        self.seen_at[meant] = min(at, self.seen_at[meant])
        return self.numbers[meant]

    @staticmethod
    def _meant(identity: Identity) -> Iterator[tuple[object, ...]]:
        """Return where those are that may be one: what it does not say may be anything, and what they do not, too."""
        hosts, births = ((ANY,) if said is None else (said, None) for said in (identity.host, identity.born))
        return product((identity.pid,), hosts, births)


def identified(processes: list[list[Line]]) -> list[list[Line]]:
    """Return the lines with every pid replaced by its process's number; those that say most of a process come first."""
    places = [(kind, line) for process in processes for line in process if (kind := _kind(line)) is not None]
    known, renamed = _Known(), dict[int, Line]()
    for kind, line in sorted(places, key=lambda place: (place[0], _time(place[1]))):
        renamed[id(line)] = _rename(line, known, is_one=kind == 0)
    return [[renamed.get(id(line), line) for line in process] for process in processes]


def _kind(line: Line) -> int | None:
    """Return how much a line says of processes: 0 for one's own, 1 for what was seen of some; None for nothing."""
    if isinstance(line.get("pid"), int):
        return 0
    return 1 if isinstance(line.get("pids"), list) else None


def _rename(line: Line, known: _Known, *, is_one: bool) -> Line:
    if is_one:
        identity = Identity(line["pid"], line.get("host"), line.get("boot"), line.get("born"))  # type: ignore[arg-type]
        return {**line, "pid": known.number(identity, _time(line))}
    pids: list[object] = line["pids"]  # type: ignore[assignment]
    hosts, born = (_beside(line, key, len(pids)) for key in ("hosts", "born"))
    numbers = [
        known.number(Identity(pid, host, None, when), _time(line)) if isinstance(pid, int) else pid
        for pid, host, when in zip(pids, hosts, born, strict=True)
    ]
    return {**line, "pids": numbers}


def _beside(line: Line, key: str, count: int) -> list[object]:
    """Return what a line says of each of its pids; None of all if it does not."""
    said = line.get(key)
    return said if isinstance(said, list) and len(said) == count else [None] * count


def _time(line: Line) -> float:
    time = line.get("t")
    return float(time) if isinstance(time, int | float) and not isinstance(time, bool) else -math.inf
