"""Cache results that all processes of a simulation compute alike, by value or by identity.

A cached result is shared: nobody may change it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, TypeVarTuple

X = TypeVar("X")
Y = TypeVar("Y")
Ys = TypeVarTuple("Ys")
T = TypeVar("T")
MOST_KNOWN = 1 << 12
"""Most results of a kind that are cached; the oldest go first."""


class Known:
    """A cache of results by key."""

    def __init__(self) -> None:
        self._known: dict[Hashable, object] = {}

    def __call__(self, key: Hashable, work_out: Callable[[], T]) -> T:
        found = self._known.get(key)  # once: a key may be long
        if found is None:
            if len(self._known) == MOST_KNOWN:
                del self._known[next(iter(self._known))]
            found = self._known[key] = work_out()
        return found  # type: ignore[return-value]  # each key has results of one kind


def memory_of(work_out: Callable[[X, *Ys], Y], size: int = 8) -> Callable[[X, *Ys], Y]:
    """Cache a function of the last `size` objects, by identity: all processes call it with the same ones."""
    known: dict[int, tuple[X, Y]] = {}  # by identity, which nothing loses while it is here

    def remembered(found: X, *rest: *Ys) -> Y:
        held = known.get(id(found))
        if held is None:
            if len(known) == size:
                del known[next(iter(known))]
            held = known[id(found)] = found, work_out(found, *rest)
        return held[1]

    return remembered


class Silent:
    """A progress display that shows nothing."""

    def update(self, status: object) -> None: ...
    def event(self, text: str) -> None: ...
    def banner(self, banner: object) -> None: ...
    def close(self) -> None: ...


class Uncompacted:
    """A compaction that does nothing: the simulated etcd keeps no history."""

    def __init__(self, *_: object) -> None: ...
    def close(self) -> None: ...
