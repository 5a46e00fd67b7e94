"""One line of the tables, and stand-ins that need nothing of a job."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TypeVar, TypeVarTuple

Replacement = tuple[ModuleType | type, str, object]
"""A module or a class, a name in it, and what the name leads to meanwhile."""

X = TypeVar("X")
Y = TypeVar("Y")
Ys = TypeVarTuple("Ys")


def within(path: str, **stand_ins: object) -> Iterator[Replacement]:
    module = importlib.import_module(path)
    for name, stand_in in stand_ins.items():
        assert hasattr(module, name), f"{path} has no {name} any more: the simulator's table is out of date"
        yield module, name, stand_in


def nothing(*_: object) -> None: ...


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
