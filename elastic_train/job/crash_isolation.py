"""Find samples that crash the process that computes them, by computing them in processes that may die.

A sample can crash a kernel or exhaust memory. Every process that owns its lane then dies at the same step without
knowing why. After worlds have ended without completing a step, each rank first has its next lanes computed by separate
processes. If one dies, the samples of the lane it died at are tried one by one.

    python -m elastic_train.job.crash_isolation FOLDER     try the lanes of FOLDER/trial.json; print crashing samples

The program imports the training code once and forks a process for each try.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from pydantic import TypeAdapter

from elastic_train.config.schema import Config
from elastic_train.core.accounting import Hole
from elastic_train.core.arrays import group_of, ranges_of
from elastic_train.errors import UnreadableError
from elastic_train.job.plan import Plan, make_plan
from elastic_train.job.state import AppliedState
from elastic_train.job.warm_up import run_once
from rendezvous.orphans import die_with_parent

SPEC, WEIGHTS, ERRORS = "trial.json", "weights.pt", "errors.txt"
ALL_COMPUTED = b"all"
"""Written by a trial process once it has computed every unit."""
_LONGEST_LINE = 300
Spec = Mapping[str, Any]
"""Contents of FOLDER/trial.json."""
_HOLES = TypeAdapter(tuple[Hole, ...])
_NOT_LAUNCHED = ("WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True, slots=True)
class Unit:
    """Samples of one lane's micro-batch that are computed together."""

    lane: int
    ids: tuple[int, ...]


def find_deadly(
    plan: Plan, state: AppliedState, step: int, lanes: Sequence[int], holes: Sequence[Hole], limit_s: float
) -> dict[int, str]:
    """Return the samples of a step (counted from 0) in `lanes` that crash a process by themselves, and how.

    The state may be of an earlier step, and sharded weights are the initial ones, since crashes seldom depend on
    weights. Stops after `limit_s` seconds and returns the samples found so far. Does not find samples that crash only
    in combination.
    """
    cursor = plan.order.cursor_at(step, plan.micro_batch)
    samples = {lane: plan.order.samples(cursor, lane, plan.micro_batch).ids.tolist() for lane in lanes}
    spec = {
        "config": plan.config.model_dump(mode="json"),
        "step": step,
        "holes": [hole.to_dict() for hole in holes],
        "units": [asdict(Unit(lane, tuple(ids))) for lane, ids in samples.items()],
    }
    with tempfile.TemporaryDirectory(prefix="elastic-train-trial-") as name:
        folder = Path(name)
        (folder / SPEC).write_text(json.dumps(spec))
        weights, cuts = state.shards.share.weights(), state.shards.cut.cuts
        torch.save({name: one for name, one in weights.items() if name not in cuts}, folder / WEIGHTS)
        return {int(found["sample"]): str(found["why"]) for found in map(json.loads, _search_beside(folder, limit_s))}


def _search_beside(folder: Path, limit_s: float) -> list[str]:
    """Run this module as a program; return the lines that it printed within `limit_s` seconds."""
    environ = {key: value for key, value in os.environ.items() if key not in _NOT_LAUNCHED}
    command = [sys.executable, "-m", "elastic_train.job.crash_isolation", str(folder)]
    try:
        said = subprocess.run(
            command, env=environ, stdout=subprocess.PIPE, timeout=limit_s, check=False, start_new_session=True
        ).stdout
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
    return said.decode().splitlines()


def search(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield the crashing samples of the lanes in FOLDER/trial.json, and how each ends its process."""
    spec = json.loads((folder / SPEC).read_text())
    left = [Unit(fields["lane"], tuple(fields["ids"])) for fields in spec["units"]]
    while left:
        number, why = _try(folder, spec, left)
        if number is None:
            return
        unit, left = left[number], left[number + 1 :]
        if len(unit.ids) == 1:
            yield unit.ids[0], why
        else:
            left = [Unit(unit.lane, (id_,)) for id_ in unit.ids] + left


def _try(folder: Path, spec: Spec, units: Sequence[Unit]) -> tuple[int | None, str]:
    """Compute units in a forked process; return the index of the unit at which it died, or None, and how it died."""
    begun, writes = os.pipe()
    process = os.fork()
    if process == 0:
        _compute_and_exit(folder, spec, units, writes)
    os.close(writes)
    with os.fdopen(begun, "rb") as lines:
        numbers = lines.read().split()
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if not numbers or numbers[-1] == ALL_COMPUTED:
        return None, ""
    return int(numbers[-1]), _how(code, (folder / ERRORS).read_text(errors="replace"))


def _how(code: int, errors: str) -> str:
    """Describe how a process ended: by a signal, or with an error whose last line is the exception."""
    if code < 0:
        return f"ends its process with {signal.Signals(-code).name}"
    if code == 0:
        return "ends its process with code 0"
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), f"code {code}")
    return f"ends its process with an error ({last[:_LONGEST_LINE]})"


def _compute_and_exit(folder: Path, spec: Spec, units: Sequence[Unit], begun: int) -> NoReturn:
    """Compute units in the forked process and exit; write each unit's number before computing it."""
    code = 1
    try:
        die_with_parent()
        with (folder / ERRORS).open("wb") as errors:
            os.dup2(errors.fileno(), 2)
        _compute_all(folder, spec, units, begun)
        code = 0
    except BaseException:  # noqa: BLE001 - this is where the process ends
        traceback.print_exc()
    finally:
        os._exit(code)


def _compute_all(folder: Path, spec: Spec, units: Sequence[Unit], begun: int) -> None:
    """Run forward and backward passes of every unit."""
    plan = make_plan(Config.model_validate(spec["config"]))
    torch.set_num_threads(plan.config.threads_per_rank)
    state = plan.build_state()
    state.model.load_state_dict(torch.load(folder / WEIGHTS, map_location=plan.device), strict=False)
    holes = _HOLES.validate_python(spec["holes"])
    for number, unit in enumerate(units):
        os.write(begun, f"{number}\n".encode())
        _compute(plan, state, spec["step"], unit, holes)
    os.write(begun, ALL_COMPUTED)  # a sample may also end the process with exit code 0


def _compute(plan: Plan, state: AppliedState, step: int, unit: Unit, holes: Sequence[Hole]) -> None:
    cursor = plan.order.cursor_at(step, plan.micro_batch)
    every = plan.order.samples(cursor, unit.lane, plan.micro_batch).ids
    others = [_without(plan, lo, hi) for lo, hi in ranges_of(every[~np.isin(every, unit.ids)])]
    lanes = range(unit.lane, unit.lane + 1)
    try:
        [[batch]] = plan.feed.training(plan.order, lanes, cursor, 1, (*holes, *others))
    except UnreadableError:
        return  # says nothing about the samples, and is left to the step
    run_once(plan, state.model, batch, step)
    if plan.device.type == "cuda":
        torch.cuda.synchronize()


def _without(plan: Plan, lo: int, hi: int) -> Hole:
    """Return a hole for samples that a trial leaves out."""
    group = group_of(plan.order.group_first_id, lo)
    return Hole(group=group, file="", row_group=0, lo=lo, hi=hi, since=0, epoch=0, applied_before=(), why="")


if __name__ == "__main__":
    import pyarrow.compute  # noqa: F401 - import once, not in every process
    import torch._dynamo  # the first optimizer imports it

    die_with_parent()
    for sample, why in search(Path(sys.argv[1])):
        sys.stdout.write(json.dumps({"sample": sample, "why": why}) + "\n")
        sys.stdout.flush()
