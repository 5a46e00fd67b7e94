"""Identify processes: pids are not unique, since containers have their own and machines reuse them.

A process is (host, boot, pid, born), as in the `form` lines of histories. Executor lines have pids, with `hosts` and
`born` where known; otherwise they mean the process seen last by then. Here every process gets a unique number, so that
the rest of the judge can ignore this: the first of a pid keeps it, the n-th after it is pid + n * AGAIN.

Lines of older versions have only pids, each taken as one process.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

Line = dict[str, object]
AGAIN = 10_000_000
"""Larger than any pid: Linux has none above 4,194,304."""
ANY = object()


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a process as a line states it; None for fields that it omits."""

    pid: int
    host: object = None
    boot: object = None
    born: object = None

    def may_be(self, other: Identity) -> bool:
        """Return True if no field that both have differs."""
        return (
            self.pid == other.pid
            and (self.host is None or other.host is None or self.host == other.host)
            and (self.boot is None or other.boot is None or self.boot == other.boot)
            and (self.born is None or other.born is None or self.born == other.born)
        )


@dataclass(slots=True)
class _Known:
    """The processes of each pid: numbers, and when each was first seen."""

    numbers: dict[Identity, int] = field(default_factory=dict)
    seen_at: dict[Identity, float] = field(default_factory=dict)
    alike: dict[tuple[object, ...], list[Identity]] = field(default_factory=lambda: defaultdict(list))
    """Keyed by pid, host and birth time, with host and birth also replaced by ANY."""

    def number(self, identity: Identity, at: float) -> int:
        """Return the number of the process that a line means; a new one if none matches."""
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
        """Return the keys of possible matches: missing fields on either side match anything."""
        hosts, births = ((ANY,) if said is None else (said, None) for said in (identity.host, identity.born))
        return product((identity.pid,), hosts, births)


def identified(processes: list[list[Line]]) -> list[list[Line]]:
    """Return the lines with each pid replaced by its process's number; the most detailed lines are resolved first."""
    places = [(kind, line) for process in processes for line in process if (kind := _kind(line)) is not None]
    known, renamed = _Known(), dict[int, Line]()
    for kind, line in sorted(places, key=lambda place: (place[0], _time(place[1]))):
        renamed[id(line)] = _rename(line, known, is_one=kind == 0)
    return [[renamed.get(id(line), line) for line in process] for process in processes]


def _kind(line: Line) -> int | None:
    """Return 0 for a process's own line, 1 for one about other processes, None for neither."""
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
    """Return a line's value for each of its pids; all None if it has none."""
    said = line.get(key)
    return said if isinstance(said, list) and len(said) == count else [None] * count


def _time(line: Line) -> float:
    time = line.get("t")
    return float(time) if isinstance(time, int | float) and not isinstance(time, bool) else -math.inf
