"""Results of health checks: uniform findings with remedies; and running several checks at once.

No finding is ever omitted: a timeout or failure is also a finding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from elastic_train.errors import ConfigError, ElasticTrainError
from elastic_train.system.wording import first_line
from rendezvous.errors import RendezvousError
from rendezvous.waiting import GivenUp, begin

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: check, level, result, and remedy."""

    check: str
    level: Level
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warn(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, "warn", found, remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, "fail", found, remedy)


Examination = Callable[[], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned check: time limit, and level and remedy if it takes longer."""

    examine: Examination
    remedy: str
    timeout_s: float
    late: Level = "fail"


def examine_all(planned: Mapping[str, Planned]) -> list[Finding]:
    """Run checks concurrently; return their findings in order."""
    began = time.monotonic()
    calls = {name: begin(f"health: {name}", partial(_findings, name, each)) for name, each in planned.items()}
    findings: list[Finding] = []
    for name, call in calls.items():
        left_s = max(0.0, began + planned[name].timeout_s - time.monotonic())
        try:
            findings += call.result(left_s)
        except GivenUp:
            one = planned[name]
            findings.append(Finding(name, one.late, f"no answer in {one.timeout_s:.0f} s", one.remedy))
    return findings


def _findings(name: str, planned: Planned) -> list[Finding]:
    """Return a check's findings; an error is one more finding, after them.

    Unexpected errors, such as torch's out-of-memory errors, prove nothing about a machine: they count as no answer.
    """
    found: list[Finding] = []
    try:
        found.extend(planned.examine())
    except ConfigError as error:
        found += [fail(name, problem, "correct it") for problem in error.problems]
    except (ElasticTrainError, RendezvousError, OSError) as error:
        found.append(fail(name, first_line(error), planned.remedy))
    except Exception as error:  # noqa: BLE001 - machines that are to be examined are broken in any way
        found.append(Finding(name, planned.late, f"{type(error).__name__}: {first_line(error)}", planned.remedy))
    return found
