"""Check the guide on scaling against real jobs that scale badly for a known reason.

Covers the branches of `docs/guides/scaling.md` that concern all ranks, D to H. Each job has one cause and is compared
with the same job without it. The phase whose share of a step grew most, averaged over ranks, must be the one that leads
to that branch in the guide; if the guide names an event, it must be reported.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.figures import Effort
from benchmarks.insight.late_rows import ORDER
from benchmarks.insight.slowed import SEEN_WITHIN_STEPS, STEP_S, TWO, Running, Shape, running
from chaos.services.network.namespace import Cable, NoNamespacesError, cable
from elastic_train.insight.phases import PHASES

STEPS, QUICK_STEPS = 60, 40
LATE_S, DELAY_S = 0.2, 0.005
TINY: dict[str, object] = {"max_tokens": 4, "dim": 4, "depth": 1, "heads": 1}
Shares = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Branch:
    """A cause, the phases it may show in, and its event; `keys` configure a job with a permanent cause."""

    name: str
    cause: str
    phases: tuple[str, ...]
    event: str | None = None
    how: str | None = None
    params: Mapping[str, object] = field(default_factory=dict)
    keys: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


BRANCHES = (
    Branch("D", "all rows come 0.2 s late for each lane", ("data",), event="data_wait", how="rows"),
    Branch(
        "E",
        "a commit after every step, each awaited by the next",
        ("save",),
        keys={"checkpoint": {"every": "1 steps", "keep_last": 2}},
    ),
    Branch("F", "5 ms each way between two ranks", ("wait", "exchange"), event="slow_network", how="link"),
    Branch("G", "three lanes over two ranks", ("wait",), keys={"batch": {"global_batch": 96, "micro_batch": 32}}),
    Branch(
        "H",
        "lanes of one row of four tokens",
        ("wait", "optimizer", "rest"),
        params=TINY,
        keys={"batch": {"global_batch": 2, "micro_batch": 1}},
    ),
)


def branches(effort: Effort) -> dict[str, object]:
    """Return each branch's phases in milliseconds, the phase that grew most, and if all match the guide."""
    steps, found = QUICK_STEPS if effort.is_quick else STEPS, dict[str, object]()
    wrong = list[str]()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as undo:
        laid = _laid(effort, undo)
        with running(Path(folder) / "usual", Shape("usual", 2, TWO, None)) as job:
            usual = _phases(job, steps)
        effort.say(f"nothing: {_words(usual)}")
        for branch in BRANCHES:
            if branch.how == "link" and laid is None:
                continue
            shape = Shape(branch.name, 2, {**TWO, **branch.params}, laid if branch.how == "link" else None, branch.keys)
            with running(Path(folder) / branch.name, shape) as job:
                before = _phases(job, steps) if branch.how else usual
                with _caused(job, branch):
                    _await_event(job, branch)
                    phases = _phases(job, steps)
                said = {line["kind"] for line in job.tail.said_of_all if not line["over"]}
            grown = _grown(before, phases)
            found[branch.name] = {"cause": branch.cause, "grown": grown, "said": sorted(said), "ms": _rounded(phases)}
            if grown not in branch.phases or (branch.event is not None and branch.event not in said):
                wrong.append(branch.name)
            effort.say(f"{branch.name}, {branch.cause}: {grown} grew most, said: {said or 'nothing'}: {_words(phases)}")
    return {"branches": {"usual": {"ms": _rounded(usual)}, **found}, "branches_as_said": not wrong}


def _laid(effort: Effort, undo: contextlib.ExitStack) -> Cable | None:
    try:
        laid = undo.enter_context(cable())
    except NoNamespacesError as error:
        effort.say(f"no slow network: {error}")
        return None
    return laid if laid.relay is not None else None


@contextlib.contextmanager
def _caused(job: Running, branch: Branch) -> Iterator[None]:
    """Apply the cause of a branch during this context."""
    if branch.how == "rows":
        for point in job.points:
            (point / ORDER).write_text(str(1e3 * LATE_S))
    elif branch.how == "link":
        assert job.laid is not None, "it is made where there is one"
        job.laid.worsen(delay_s=DELAY_S)
    yield
    if branch.how == "link" and job.laid is not None:
        job.laid.mend()


def _await_event(job: Running, branch: Branch) -> None:
    """Wait until the branch's event is reported, if it has one: read-ahead hides late rows until it is used up."""
    tail, began = job.tail, job.tail.step
    if branch.event is not None:
        tail.until(
            lambda: any(e["kind"] == branch.event for e in tail.said_of_all) or tail.step > began + SEEN_WITHIN_STEPS,
            STEP_S,
        )


def _phases(job: Running, steps: int) -> dict[str, float]:
    """Return a rank's mean seconds per phase over the next `steps` steps."""
    tail, began = job.tail, job.tail.step + 1
    tail.until(lambda: tail.step >= began + steps, STEP_S)
    rows = np.array([tail.rows[step] for step in range(began + 1, tail.step + 1) if step in tail.rows])
    return dict(zip(PHASES, rows.mean(axis=(0, 1)).tolist(), strict=False))


def _grown(before: Shares, phases: Shares) -> str:
    """Return the phase whose share of a step has grown most."""
    shares = [{name: seconds / sum(one.values()) for name, seconds in one.items()} for one in (before, phases)]
    return max(PHASES, key=lambda name: shares[1][name] - shares[0][name])


def _rounded(phases: Shares) -> dict[str, float]:
    return {name: round(1e3 * seconds, 1) for name, seconds in phases.items()}


def _words(phases: Shares) -> str:
    return ", ".join(f"{name} {ms}" for name, ms in _rounded(phases).items()) + " ms"
