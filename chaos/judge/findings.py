"""Findings: an invariant is true, false (with a witness in words), or unknown.

Unknown means not tested, or that the check raised. A run is valid if every finding is true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")
Truth = Literal["true", "false", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding on one invariant, and its reason in words."""

    invariant: str
    truth: Truth
    why: str


class Violated(Exception):  # noqa: N818 - a finding, not a failure of the checker
    """Raised if an invariant is false; the message is the witness."""


class Unknown(Exception):  # noqa: N818 - as above
    """Raised if an invariant was not tested."""


def find(invariant: str, check: Callable[[], str]) -> Finding:
    """Run one check, which returns why the invariant holds, or raises."""
    try:
        return Finding(invariant, "true", check())
    except Violated as violation:
        return Finding(invariant, "false", str(violation))
    except Unknown as unknown:
        return Finding(invariant, "unknown", str(unknown))
    except Exception as error:  # noqa: BLE001 - whatever a check trips over, it has not checked
        return Finding(invariant, "unknown", f"the check could not be made: {type(error).__name__}: {error}")


def unless_broken(compute: Callable[[], T], otherwise: T) -> T:
    """Return a computed value, or `otherwise` if the files do not allow it: findings then say why."""
    try:
        return compute()
    except Exception:  # noqa: BLE001 - a verdict is given on whatever files hold
        return otherwise
