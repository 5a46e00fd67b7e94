"""Periods as text: '100 steps', '15 min', '2 epochs', or several with commas between them."""

from __future__ import annotations

import re
from typing import NamedTuple

SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "day": 86400.0}
"""Units of time, and their lengths in seconds."""


class Forms(NamedTuple):
    """The units that a key takes (steps, epochs, worlds, s), and all of its valid forms as advice."""

    units: tuple[str, ...]
    advice: str


def periods_of(text: str | None, forms: Forms) -> dict[str, float]:
    """Return the periods that a text names, by unit; times are in seconds, under 's'.

    Raises ValueError for a text that is not a period, or names two of one unit.
    """
    periods = dict[str, float]()
    for part in text.split(",") if text is not None else ():
        unit, number = _period(part.strip(), forms)
        if unit in periods:
            raise ValueError(f"names two periods in {'time' if unit == 's' else unit}: give one of each")
        periods[unit] = number
    return periods


def _period(text: str, forms: Forms) -> tuple[str, float]:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([a-z]+)", text)
    name = "" if found is None else found[2] if found[2] in SECONDS else f"{found[2].removesuffix('s')}s"
    unit = "s" if name in SECONDS or name == "days" else name
    if found is None or unit not in forms.units or not float(found[1]) or (unit != "s" and not found[1].isdecimal()):
        raise ValueError(f"'{text}' is not a period: {forms.advice}")
    return unit, float(found[1]) * (SECONDS[name.removesuffix("s") or "s"] if unit == "s" else 1.0)


def written(**periods: float | None) -> str | None:
    """Return periods as a text, such as '50 steps, 900 s'; None for none."""
    return ", ".join(f"{number:.15g} {unit}" for unit, number in periods.items() if number is not None) or None


def whole(number: float | None) -> int | None:
    """Return a number of steps, epochs or worlds as an integer."""
    return None if number is None else int(number)


def has_unit(value: object, forms: Forms) -> object:
    """Return a key's value; raise ValueError for a number without a unit."""
    is_bare = type(value) in (int, float)
    if is_bare:
        raise ValueError(f"has no unit: {forms.advice}")
    return value
