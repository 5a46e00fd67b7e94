"""What all processes of a simulation work out alike, worked out once: by what it is worked out of, or by its value.

A result that was remembered is the same object for everybody, and nobody may change it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, TypeVarTuple

X = TypeVar("X")
Y = TypeVar("Y")
Ys = TypeVarTuple("Ys")
T = TypeVar("T")
MOST_KNOWN = 1 << 12
"""So many results of a kind are remembered, the last ones."""


class Known:
    """Results by what they follow from."""

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
    """Remember what was worked out of the last objects: every process of a simulation does it of the same ones."""
    known: dict[int, tuple[X, Y]] = {}  # by identity, which nothing loses while it is here

    def remembered(found: X, *rest: *Ys) -> Y:
        held = known.get(id(found))
        if held is None:
            if len(known) == size:
                del known[next(iter(known))]
            held = known[id(found)] = found, work_out(found, *rest)
        return held[1]

    return remembered
