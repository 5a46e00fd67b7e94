"""Trials: which samples of a step end the process that computes them, found in processes that may die of it.

A sample can crash a kernel or exhaust memory. Then every process that owns its lane dies at the same step, and knows
nothing of why. So where worlds have ended without a step, each rank has its lanes of the next step computed by a child
process first. If that dies, the samples of the lane at which it died are tried one by one.

    python -m elastic_train.job.trial FOLDER     the child: computes the units of FOLDER/trial.json, one after another
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter

from elastic_train.config.schema import Config
from elastic_train.core.accounting import Hole
from elastic_train.core.arrays import group_of, ranges_of
from elastic_train.job.plan import Plan, make_plan
from elastic_train.job.state import AppliedState
from elastic_train.job.warm_up import run_once
from rendezvous.orphans import die_with_parent

SPEC, WEIGHTS, ERRORS = "trial.json", "weights.pt", "errors.txt"
_LONGEST_LINE = 300
_HOLES = TypeAdapter(tuple[Hole, ...])
_NOT_LAUNCHED = ("WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True, slots=True)
class Unit:
    """Some samples of one lane's micro-batch, computed together."""

    lane: int
    ids: tuple[int, ...]


def find_deadly(
    plan: Plan, state: AppliedState, step: int, lanes: Sequence[int], holes: Sequence[Hole], limit_s: float
) -> dict[int, str]:
    """Return the samples of a step, counted from 0, in these lanes, that end a process by themselves, and how.

    The state may be that of an earlier step, and weights of which this rank holds but a share are those of the
    beginning: what samples do to a process seldom depends on weights. Gives up after
    `limit_s` seconds, or where samples end a process only together, with those found so far.
    """
    cursor = plan.order.cursor_at(step, plan.micro_batch)
    epoch, lo = plan.order.epoch(cursor.epoch), cursor.offset
    ids = {lane: tuple(epoch.ids(lane, lo, lo + plan.micro_batch).tolist()) for lane in lanes}
    deadline, found = time.monotonic() + limit_s, dict[int, str]()
    left = [Unit(lane, ids[lane]) for lane in lanes]
    with tempfile.TemporaryDirectory(prefix="elastic-train-trial-") as name:
        folder = Path(name)
        torch.save(dict(state.shards.weights()), folder / WEIGHTS)
        while left and time.monotonic() < deadline:
            number, why = _try(folder, plan, step, holes, left, deadline)
            if number is None:
                break
            unit, left = left[number], left[number + 1 :]
            if len(unit.ids) == 1:
                found[unit.ids[0]] = why
            else:
                left = [Unit(unit.lane, (id_,)) for id_ in unit.ids] + left
    return found


def _try(
    folder: Path, plan: Plan, step: int, holes: Sequence[Hole], units: Sequence[Unit], deadline: float
) -> tuple[int | None, str]:
    """Have units computed in a child process; return the number of the one at which it ended too soon, and how."""
    spec = {
        "config": plan.config.model_dump(mode="json"),
        "step": step,
        "holes": [hole.to_dict() for hole in holes],
        "units": [asdict(unit) for unit in units],
    }
    (folder / SPEC).write_text(json.dumps(spec))
    environ = {key: value for key, value in os.environ.items() if key not in _NOT_LAUNCHED}
    command = [sys.executable, "-m", "elastic_train.job.trial", str(folder)]
    with (folder / ERRORS).open("wb") as errors:
        try:
            left_s = max(0.0, deadline - time.monotonic())
            done = subprocess.run(
                command, env=environ, stdout=subprocess.PIPE, stderr=errors, timeout=left_s, check=False
            )
        except subprocess.TimeoutExpired:
            return None, ""
    begun = done.stdout.split()
    if done.returncode == 0 or not begun:
        return None, ""
    return int(begun[-1]), _how(done.returncode, (folder / ERRORS).read_text(errors="replace"))


def _how(code: int, errors: str) -> str:
    """Describe how a child ended: by a signal, or with an error whose last line is the exception."""
    if code < 0:
        return f"ends its process with {signal.Signals(-code).name}"
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), f"code {code}")
    return f"ends its process with an error ({last[:_LONGEST_LINE]})"


def compute(folder: Path) -> None:
    """Compute forward and backward of every unit, writing its number to standard output first."""
    spec = json.loads((folder / SPEC).read_text())
    plan = make_plan(Config.model_validate(spec["config"]))
    torch.set_num_threads(plan.config.threads_per_rank)
    state = plan.build_state()
    state.model.load_state_dict(torch.load(folder / WEIGHTS, map_location=plan.device), strict=False)
    step, holes = spec["step"], _HOLES.validate_python(spec["holes"])
    for number, fields in enumerate(spec["units"]):
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        _compute(plan, state, step, Unit(fields["lane"], tuple(fields["ids"])), holes)


def _compute(plan: Plan, state: AppliedState, step: int, unit: Unit, holes: Sequence[Hole]) -> None:
    cursor = plan.order.cursor_at(step, plan.micro_batch)
    every = plan.order.epoch(cursor.epoch).ids(unit.lane, cursor.offset, cursor.offset + plan.micro_batch)
    others = [_without(plan, lo, hi) for lo, hi in ranges_of(every[~np.isin(every, unit.ids)])]
    lanes = range(unit.lane, unit.lane + 1)
    [[batch]] = plan.feed.training(plan.order, lanes, cursor, 1, (*holes, *others))
    run_once(plan, state.model, batch, step)
    if plan.device.type == "cuda":
        torch.cuda.synchronize()


def _without(plan: Plan, lo: int, hi: int) -> Hole:
    """Describe samples that are left out of a trial."""
    group = group_of(plan.order.group_first_id, lo)
    return Hole(group=group, file="", row_group=0, lo=lo, hi=hi, since=0, epoch=0, applied_before=(), why="")


if __name__ == "__main__":
    die_with_parent()
    compute(Path(sys.argv[1]))
