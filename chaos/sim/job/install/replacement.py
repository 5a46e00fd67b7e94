"""One entry of the tables, and stand-ins that need no job."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

Replacement = tuple[ModuleType | type, str, object]
"""A module or class, a name in it, and the replacement."""


def within(path: str, **stand_ins: object) -> Iterator[Replacement]:
    module = importlib.import_module(path)
    for name, stand_in in stand_ins.items():
        assert hasattr(module, name), f"{path} has no {name} any more: the simulator's table is out of date"
        yield module, name, stand_in


def nothing(*_: object) -> None: ...
