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
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import Effort
from benchmarks.models.jobs import JOBS, write_job
from chaos.judge.evidence.run_files import collect
from elastic_train.system.failpoints import VARIABLE, arm

NUM_STEPS, KILLED_AT, TIMEOUT_S = 6, 20, 300.0
ALONE = ("one rank", 1, "")
INTERLEAVED = "schedule=interleaved"


class Family(NamedTuple):
    """Jobs that must end with the weights of the first one; each has a number of ranks, and settings of `parallel`."""

    cases: Mapping[str, tuple[int, str]]
    first: tuple[str, int, str] = ALONE
    sizes: Mapping[str, object] = {}
    """Changes of the decoder."""


def _one_cell(num_ranks: int, keys: str) -> tuple[str, int, str]:
    return "one cell", num_ranks, keys


UNTIED, EXPERTS = {"tied": False}, {"tied": False, "experts": 4}
FAMILIES: Mapping[str, Family] = {
    "tp2": Family(
        {"2 cells": (4, "tensor=2"), "3 cells": (6, "tensor=2"), "2 cells, a rank killed": (4, "tensor=2")},
        _one_cell(2, "tensor=2"),
    ),
    "tp2_pp2": Family(
        {
            "2 cells": (8, "tensor=2 pipeline=2"),
            "2 cells, interleaved": (8, f"tensor=2 pipeline=2 {INTERLEAVED}"),
            "2 cells, a rank killed": (8, "tensor=2 pipeline=2"),
        },
        _one_cell(2, "tensor=2"),
        UNTIED,
    ),
    "pp2": Family(
        {
            "2 stages": (2, "pipeline=2"),
            "2 stages, gpipe": (2, "pipeline=2 schedule=gpipe"),
            "2 stages, interleaved": (2, f"pipeline=2 {INTERLEAVED}"),
            "4 stages": (4, "pipeline=4"),
            "2 cells": (4, "pipeline=2"),
            "2 cells, a stage killed": (4, "pipeline=2"),
            "2 cells, interleaved, a stage killed": (4, f"pipeline=2 {INTERLEAVED}"),
        },
        sizes=UNTIED,
    ),
    "ep2": Family(
        {
            "2 ranks": (2, "expert=2"),
            "4 ranks": (4, "expert=4"),
            "2 cells": (4, "expert=2"),
            "2 cells, a rank killed": (4, "expert=2"),
        },
        sizes={"experts": 4},
    ),
    "cp2": Family(
        {
            "2 cells": (4, "context=2"),
            "3 cells": (6, "context=2"),
            "2 cells, recomputed": (4, "context=2 recompute=units"),
            "2 cells, a rank killed": (4, "context=2"),
        },
        _one_cell(2, "context=2"),
    ),
    "cp2_pp2": Family(
        {
            "1 cell": (4, "context=2 pipeline=2"),
            "1 cell, interleaved": (4, f"context=2 pipeline=2 {INTERLEAVED}"),
            "2 cells": (8, "context=2 pipeline=2"),
            "1 cell, a rank killed": (4, "context=2 pipeline=2"),
        },
        _one_cell(2, "context=2"),
        UNTIED,
    ),
    "cp2_tp2": Family(
        {
            "2 cells": (8, "context=2 tensor=2"),
            "1 cell, in 2 stages": (8, "context=2 tensor=2 pipeline=2"),
            "1 cell, a rank killed": (4, "context=2 tensor=2"),
        },
        _one_cell(4, "context=2 tensor=2"),
        UNTIED,
    ),
    "ep2_pp2": Family(
        {
            "2 stages": (2, "pipeline=2"),
            "2 stages, interleaved": (2, f"pipeline=2 {INTERLEAVED}"),
            "1 cell": (4, "expert=2 pipeline=2"),
            "2 cells": (8, "expert=2 pipeline=2"),
            "2 cells, a rank killed": (8, "expert=2 pipeline=2"),
        },
        sizes=EXPERTS,
    ),
    "ep2_tp2": Family(
        {
            "1 cell, spread": (4, "tensor=2 expert=2"),
            "2 cells, spread, a rank killed": (8, "tensor=2 expert=2"),
            "1 cell, spread, in 2 stages": (8, "tensor=2 expert=2 pipeline=2"),
        },
        _one_cell(2, "tensor=2"),
        EXPERTS,
    ),
}


def one_hash(name: str, effort: Effort) -> dict[str, object]:
    """Return, for each case of a family, True if its weights equal those of the first job."""
    return {f"one_hash.{name}": compared(effort, FAMILIES[name])}


def compared(effort: Effort, family: Family) -> dict[str, bool]:
    """Return, for each case, True if its job ends with the weights of the first one."""
    job = JOBS["lm"]
    params = {**job.params, "model": {**job.params["model"], "dropout": 0.1, **family.sizes}}
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = write_job(folder, replace(job, params=params), max_steps=NUM_STEPS)
        for name, (num_ranks, keys) in {family.first[0]: family.first[1:], **family.cases}.items():
            points = folder / f"points {name}"
            points.mkdir()
            if "killed" in name:
                arm(points, "backward", "kill", nth=KILLED_AT)
            how = [word for key in keys.split() for word in f"--parallel.{key}".split("=")]
            found[name] = _hash_of(path, folder / name, [*how, "--ranks", str(num_ranks)], points)
            assert not (points / "backward").exists(), "no rank was killed"
            assert all(line["commit"] is None for line in collect(folder / name).of("restore")), "a step was lost"
            effort.say(f"{name}: {found[name][:12]}")
    expected = found.pop(family.first[0])
    return {name: one == expected for name, one in found.items()}


def _hash_of(path: str, folder: Path, how: list[str], points: Path) -> str:
    command = [sys.executable, "-m", "elastic_train.cli.main", "launch", path, *how, "--run.dir", str(folder)]
    environ = {**os.environ, VARIABLE: str(points)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return str(json.loads((folder / "result.json").read_text())["weights_sha256"])
