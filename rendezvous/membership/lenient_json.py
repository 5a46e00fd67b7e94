"""Read dataclasses from JSON leniently, since another version, or a person, may have written them.

Unknown fields are ignored, so a newer version may add fields: members of both versions can train together while a job
is upgraded node by node. Unreadable text raises an error that the reader can act on, not the parser's.

A record's field `format` gives its layout; absent means 1. It is raised only by changes that older versions must not
misread, and a kind of record whose layout has changed reads older ones as well (`unpack`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

FORMAT = 2
"""The newest layout that this version can read."""

R = TypeVar("R")


class UnreadableRecordError(ValueError):
    """A text is not the record expected under its key; the message says why."""


class NewerRecordError(UnreadableRecordError):
    """A record has a layout that only newer versions can read."""


def read_record(kind: type[R], text: str) -> R:
    """Read a dataclass from JSON; raises UnreadableRecordError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableRecordError(f"not JSON ({error})") from None
    if not isinstance(found, dict):
        raise UnreadableRecordError(f"{type(found).__name__} instead of an object")
    layout = found.get("format", 1)
    if not isinstance(layout, int) or layout > FORMAT:
        raise NewerRecordError(f"format {layout!r}, and this version reads formats up to {FORMAT}")
    unpack: Callable[[dict[str, Any]], Mapping[str, Any]] | None = getattr(kind, "unpack", None)
    made: R = from_fields(kind, found if unpack is None else unpack(found))
    return made


def from_fields(kind: Any, found: Mapping[str, Any]) -> Any:
    """Make a dataclass from what JSON has of it; raises UnreadableRecordError."""
    hints = _hints(kind)
    values = {name: _value(found[name], hint, name) for name, (hint, _) in hints.items() if name in found}
    missing = [name for name, (_, is_needed) in hints.items() if is_needed and name not in found]
    if missing:
        raise UnreadableRecordError(f"no field {', '.join(missing)}")
    return kind(**values)


def _value(found: Any, hint: Any, name: str) -> Any:
    """Return a field's value; lists become tuples and objects dataclasses, according to the hint."""
    origin = get_origin(hint)
    if origin is tuple and isinstance(found, list):
        return tuple(_value(each, get_args(hint)[0], name) for each in found)
    if is_dataclass(hint) and isinstance(found, dict):
        return from_fields(hint, found)
    if origin is UnionType:
        hint, is_none = next(each for each in get_args(hint) if each is not type(None)), found is None
        return None if is_none else _value(found, hint, name)
    wanted: Any = str if origin is Literal else (int, float) if hint is float else hint
    if origin is tuple or is_dataclass(hint) or isinstance(found, bool) or not isinstance(found, wanted):
        raise UnreadableRecordError(f"{name} is {found!r:.40}")
    return found


@cache
def _hints(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return the type of every field, and True if it is required."""
    hints = get_type_hints(kind)
    return {field.name: (hints[field.name], field.default is MISSING) for field in fields(kind)}
