"""What an examination finds: lines of one form, each with its remedy; and how several examinations are made at once.

No line is ever left out: what does not answer in time, or fails, is a finding, too.
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
    """One line: what was looked at, whether it is well, what was found, and what to do if it is not."""

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
    """An examination, how long it may take, and how bad it is, and what to do, if it takes longer."""

    examine: Examination
    remedy: str
    timeout_s: float
    late: Level = "fail"


def examine_all(planned: Mapping[str, Planned]) -> list[Finding]:
    """Make examinations beside each other; return what they find, in their order."""
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
    """Return what an examination finds; an error is one more finding, after those before it.

    What is no error that users meet, such as those that torch raises where memory is out, proves nothing of a machine:
    it counts as no answer does.
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
