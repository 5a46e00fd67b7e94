"""Shared wording of messages and tables: durations, sizes, counts, one-line errors, suggestions for names."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterable, Sequence

_LONGEST_LINE = 300
_DASH, _UNITS = "–", ("B", "kB", "MB", "GB", "TB")
LEFT_OUT = "***"
"""Placeholder for a user and a password."""


def duration(seconds: float) -> str:
    """Return a duration in the largest unit of which there are two, such as '90 s', '2.5 min', '3.0 d'."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def durations(seconds: Sequence[float | None]) -> list[str]:
    """Return durations for one column of a table: all in the unit of the longest; a dash for None."""
    longest = max((value for value in seconds if value is not None), default=0.0)
    units = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))
    unit, length = next(((unit, length) for unit, length in units if longest >= 2 * length), ("s", 1.0))
    form = ".3g" if unit == "s" else ".1f"
    return [_DASH if value is None else f"{value / length:{form}} {unit}" for value in seconds]


def sizes(num_bytes: Sequence[float | None]) -> list[str]:
    """Return amounts of storage for one column of a table: all in the unit of the largest; a dash for None."""
    largest = max((value for value in num_bytes if value is not None), default=0.0)
    unit, length = next(
        ((unit, 1000.0**n) for n, unit in enumerate(_UNITS) if largest < 1000.0 ** (n + 1)), ("TB", 1e12)
    )
    return [_DASH if value is None else f"{value / length:.3g} {unit}" for value in num_bytes]


def rate(value: float) -> str:
    """Return a rate per second without an exponent, such as '38,560' or '7.31'."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def size(num_bytes: float) -> str:
    """Return an amount of storage in decimal units, such as '1.5 GB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


POWERS_OF_TEN = frozenset(10**power for power in range(10))
"""The numbers at which an event that happens again and again is announced."""


def counted(number: int, noun: str, form: str = "") -> str:
    """Return a count with its noun, such as '1 rank' and '2 ranks'; `form` is the number's format."""
    return f"{number:{form}} {noun}" if number == 1 else f"{number:{form}} {noun}s"


def a(noun: str) -> str:
    """Return a noun with its indefinite article, such as 'a list' and 'an int'."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def updates_left_out(steps: Iterable[Sequence[int]]) -> str:
    """Return how many updates were left out, and why; `steps` are half-open ranges. Empty if there are none."""
    if not (number := sum(hi - lo for lo, hi in steps)):
        return ""
    were = "update was" if number == 1 else "updates were"
    return f"{number} {were} left out because the loss or gradient was not finite, or no sample had a target"


def done(made: str, then: str) -> str:
    """Return the last line of a command: what it made, and what to do next."""
    return f"Done: {made}, next: {then}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without passwords in URLs, or its class if it has none."""
    return without_passwords(str(error) or type(error).__name__).partition("\n")[0][:_LONGEST_LINE]


def json_fault(error: Exception) -> str:
    """Return why one line is not JSON, with the column; the decoder would count lines within it."""
    return (
        f"{error.msg.removesuffix(' at')} at column {error.colno}"
        if isinstance(error, json.JSONDecodeError)
        else str(error)
    )


def without_passwords(text: str) -> str:
    return re.sub(r"://[^/\s]*@", f"://{LEFT_OUT}@", text)


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name nearest to a mistyped one; None if none reaches `cutoff`, difflib's ratio in [0, 1]."""
    by_folded = {each.casefold(): each for each in known}
    found = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=cutoff)
    return by_folded[found[0]] if found else None


def did_you_mean(meant: str | None, otherwise: str = "") -> str:
    """Return the end of a message about an unknown name: the suggestion, else `otherwise`."""
    return otherwise if meant is None else f"; did you mean '{meant}'?"


_NAMES = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp", "ClientError"),
    ("azure.core.exceptions", "AzureError"),
)


def sdk_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return `others` and the SDK error classes of the packages in use.

    fsspec's file systems translate answers and pass other errors on. Only an imported package can raise its errors,
    so nothing is imported here.
    """
    return *others, *(getattr(sys.modules[module], name) for module, name in _NAMES if module in sys.modules)
