"""Compare final weights of live jobs with several replicas, every kind of degree, and a killed rank.

The kill must cost no applied step. Stages and experts do not change any bit, so these jobs are compared with one rank;
tensor and context ranks are compared with one replica, since they sum partial products or parts of a row in another
order.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.figures import Effort
from benchmarks.models.jobs import JOBS, write_job
from chaos.judge.evidence.run_files import collect
from elastic_train.system.failpoints import VARIABLE, arm

NUM_STEPS, KILLED_AT, TIMEOUT_S = 6, 20, 300.0
Cases = Mapping[str, tuple[int, Sequence[str]]]
"""Numbers of ranks, and further settings."""
TENSOR: Cases = {
    "2 cells": (4, ("tensor", "2")),
    "3 cells": (6, ("tensor", "2")),
    "2 cells, a rank killed": (4, ("tensor", "2")),
}
TENSOR_STAGES: Cases = {
    "2 cells": (8, ("tensor", "2", "pipeline", "2")),
    "2 cells, interleaved": (8, ("tensor", "2", "pipeline", "2", "schedule", "interleaved")),
    "2 cells, a rank killed": (8, ("tensor", "2", "pipeline", "2")),
}
STAGES: Cases = {
    "2 stages": (2, ("pipeline", "2")),
    "2 stages, gpipe": (2, ("pipeline", "2", "schedule", "gpipe")),
    "2 stages, interleaved": (2, ("pipeline", "2", "schedule", "interleaved")),
    "4 stages": (4, ("pipeline", "4")),
    "2 cells": (4, ("pipeline", "2")),
    "2 cells, a stage killed": (4, ("pipeline", "2")),
    "2 cells, interleaved, a stage killed": (4, ("pipeline", "2", "schedule", "interleaved")),
}
EXPERTS: Cases = {
    "2 ranks": (2, ("expert", "2")),
    "4 ranks": (4, ("expert", "4")),
    "2 cells": (4, ("expert", "2")),
    "2 cells, a rank killed": (4, ("expert", "2")),
}
CONTEXT: Cases = {
    "2 cells": (4, ("context", "2")),
    "3 cells": (6, ("context", "2")),
    "2 cells, recomputed": (4, ("context", "2", "recompute", "units")),
    "2 cells, a rank killed": (4, ("context", "2")),
}
CONTEXT_STAGES: Cases = {
    "1 cell": (4, ("context", "2", "pipeline", "2")),
    "1 cell, interleaved": (4, ("context", "2", "pipeline", "2", "schedule", "interleaved")),
    "2 cells": (8, ("context", "2", "pipeline", "2")),
    "1 cell, a rank killed": (4, ("context", "2", "pipeline", "2")),
}
CONTEXT_TENSOR: Cases = {
    "2 cells": (8, ("context", "2", "tensor", "2")),
    "1 cell, in 2 stages": (8, ("context", "2", "tensor", "2", "pipeline", "2")),
    "1 cell, a rank killed": (4, ("context", "2", "tensor", "2")),
}
EXPERT_STAGES: Cases = {
    "2 stages": (2, ("pipeline", "2")),
    "2 stages, interleaved": (2, ("pipeline", "2", "schedule", "interleaved")),
    "1 cell": (4, ("expert", "2", "pipeline", "2")),
    "2 cells": (8, ("expert", "2", "pipeline", "2")),
    "2 cells, a rank killed": (8, ("expert", "2", "pipeline", "2")),
}
EXPERT_TENSOR: Cases = {
    "1 cell, spread": (4, ("tensor", "2", "expert", "2")),
    "2 cells, spread, a rank killed": (8, ("tensor", "2", "expert", "2")),
    "1 cell, spread, in 2 stages": (8, ("tensor", "2", "expert", "2", "pipeline", "2")),
}


def of_tensor(effort: Effort) -> dict[str, object]:
    """Return, for each case of tensor ranks, True if its weights equal those of one replica."""
    return {"one_hash.tp2": compared(effort, TENSOR, {}, ("one cell", 2, ("tensor", "2")))}


def of_tensor_stages(effort: Effort) -> dict[str, object]:
    """Return, for each case of tensor ranks in stages, True if its weights equal one replica's without stages."""
    one_cell = ("one cell", 2, ("tensor", "2"))
    return {"one_hash.tp2_pp2": compared(effort, TENSOR_STAGES, {"tied": False}, one_cell)}


def of_stages(effort: Effort) -> dict[str, object]:
    """Return, for each case of stages, True if its weights equal those of one rank."""
    return {"one_hash.pp2": compared(effort, STAGES, {"tied": False})}


def of_experts(effort: Effort) -> dict[str, object]:
    """Return, for each case of expert parallelism, True if its weights equal those of one rank."""
    return {"one_hash.ep2": compared(effort, EXPERTS, {"experts": 4})}


def of_context(effort: Effort) -> dict[str, object]:
    """Return, for each case of context parallelism, True if its weights equal those of one replica."""
    one_cell = ("one cell", 2, ("context", "2"))
    return {"one_hash.cp2": compared(effort, CONTEXT, {}, one_cell)}


def of_context_stages(effort: Effort) -> dict[str, object]:
    """Return, for each case of context ranks in stages, True if its weights equal one replica's without stages."""
    one_cell = ("one cell", 2, ("context", "2"))
    return {"one_hash.cp2_pp2": compared(effort, CONTEXT_STAGES, {"tied": False}, one_cell)}


def of_context_tensor(effort: Effort) -> dict[str, object]:
    """Return, for each case of context and tensor ranks, True if its weights equal those of one replica of both."""
    one_cell = ("one cell", 4, ("context", "2", "tensor", "2"))
    return {"one_hash.cp2_tp2": compared(effort, CONTEXT_TENSOR, {"tied": False}, one_cell)}


def of_expert_stages(effort: Effort) -> dict[str, object]:
    """Return, for each case of stages with experts, True if its weights equal those of one rank."""
    return {"one_hash.ep2_pp2": compared(effort, EXPERT_STAGES, {"tied": False, "experts": 4})}


def of_expert_tensor(effort: Effort) -> dict[str, object]:
    """Return, for each case of tensor ranks with experts, True if its weights equal one tensor-parallel replica's."""
    one_cell = ("one cell", 2, ("tensor", "2"))
    return {"one_hash.ep2_tp2": compared(effort, EXPERT_TENSOR, {"tied": False, "experts": 4}, one_cell)}


def compared(
    effort: Effort,
    cases: Cases,
    sizes: Mapping[str, object],
    first: tuple[str, int, Sequence[str]] = ("one rank", 1, ()),
) -> dict[str, bool]:
    """Return, for each case, True if its job ends with the weights of the first one."""
    job = JOBS["lm"]
    params = {**job.params, "model": {**job.params["model"], "dropout": 0.1, **sizes}}
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = write_job(folder, replace(job, params=params), max_steps=NUM_STEPS)
        for name, (num_ranks, keys) in {first[0]: first[1:], **cases}.items():
            points = folder / f"points {name}"
            points.mkdir()
            if "killed" in name:
                arm(points, "backward", "kill", nth=KILLED_AT)
            pairs = zip(keys[::2], keys[1::2], strict=True)
            how = [word for key, value in pairs for word in (f"--parallel.{key}", value)]
            found[name] = _hash_of(path, folder / name, [*how, "--ranks", str(num_ranks)], points)
            assert not (points / "backward").exists(), "no rank was killed"
            assert all(line["commit"] is None for line in collect(folder / name).of("restore")), "a step was lost"
            effort.say(f"{name}: {found[name][:12]}")
    expected = found.pop(first[0])
    return {name: one == expected for name, one in found.items()}


def _hash_of(path: str, folder: Path, how: list[str], points: Path) -> str:
    command = [sys.executable, "-m", "elastic_train.cli.main", "launch", path, *how, "--run.dir", str(folder)]
    environ = {**os.environ, VARIABLE: str(points)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return str(json.loads((folder / "result.json").read_text())["weights_sha256"])
