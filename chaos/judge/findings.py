"""What the judge says: a finding on one invariant is true, false with a witness in words, or unknown.

Unknown is what nothing put to the test, and what a check that raises comes to. A run is valid when every finding
is true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")
Truth = Literal["true", "false", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one invariant came to, and why in words."""

    invariant: str
    truth: Truth
    why: str


class Violated(Exception):  # noqa: N818 - a finding, not a failure of the checker
    """An invariant is false; the message is its witness."""


class Unknown(Exception):  # noqa: N818 - as above
    """An invariant was not put to the test."""


def find(invariant: str, check: Callable[[], str]) -> Finding:
    """Make one check; it returns why the invariant holds, or raises."""
    try:
        return Finding(invariant, "true", check())
    except Violated as violation:
        return Finding(invariant, "false", str(violation))
    except Unknown as unknown:
        return Finding(invariant, "unknown", str(unknown))
    except Exception as error:  # noqa: BLE001 - whatever a check trips over, it has not checked
        return Finding(invariant, "unknown", f"the check could not be made: {type(error).__name__}: {error}")


def unless_broken(compute: Callable[[], T], otherwise: T) -> T:
    """Return what is shown with a verdict, or something else where the files do not say it: findings then say why."""
    try:
        return compute()
    except Exception:  # noqa: BLE001 - a verdict is given on whatever files hold
        return otherwise
