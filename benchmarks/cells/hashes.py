"""One hash: live jobs in stages, by either schedule, of one and two cells, and with a killed stage, beside one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.figures import Effort
from benchmarks.models.jobs import JOBS, write_job
from elastic_train.system.failpoints import VARIABLE, arm

NUM_STEPS, KILLED_AT, TIMEOUT_S = 6, 20, 300.0
CASES = {
    "one rank": (1, 1, "1f1b"),
    "2 stages": (2, 2, "1f1b"),
    "2 stages, gpipe": (2, 2, "gpipe"),
    "4 stages": (4, 4, "1f1b"),
    "2 cells": (2, 4, "1f1b"),
    "2 cells, a stage killed": (2, 4, "1f1b"),
}


def one_hash(effort: Effort) -> dict[str, object]:
    """Say for each case whether its weights are those of one rank."""
    job = JOBS["lm"]
    params = {**job.params, "model": {**job.params["model"], "tied": False, "dropout": 0.1}}
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = write_job(folder, replace(job, params=params), max_steps=NUM_STEPS)
        for name, (num_stages, num_ranks, kind) in CASES.items():
            points = folder / f"points {name}"
            points.mkdir()
            if "killed" in name:
                arm(points, "backward", "kill", nth=KILLED_AT)
            how = ["--parallel.pipeline", str(num_stages), "--parallel.schedule", kind, "--ranks", str(num_ranks)]
            found[name] = _hash_of(path, folder / name, how, points)
            assert not (points / "backward").exists(), "no stage was killed"
            effort.say(f"{name}: {found[name][:12]}")
    expected = found.pop("one rank")
    return {"one_hash.pp2": {name: one == expected for name, one in found.items()}}


def _hash_of(path: str, folder: Path, how: list[str], points: Path) -> str:
    command = [sys.executable, "-m", "elastic_train.cli.main", "launch", path, *how, "--run.dir", str(folder)]
    environ = {**os.environ, VARIABLE: str(points)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return str(json.loads((folder / "result.json").read_text())["weights_sha256"])
