"""Compare the final weights of live jobs of one to four ranks, and of a job of four with a killed worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.models.jobs import JOBS, LLAMA, Job, adapters, write_job
from elastic_train.system.failpoints import VARIABLE, arm

NUM_STEPS, KILLED_AT = 6, 10
"""The kill comes at the tenth forward pass that any worker begins: in the third step."""
TIMEOUT_S = 300.0


def hashes_of(name: str, worlds: Sequence[int], overrides: Sequence[str] = ()) -> dict[str, str]:
    """Return the weights' hash by number of ranks, and that of the job with a killed worker."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = write_job(folder, _job(name, folder / "base"), max_steps=NUM_STEPS)
        found = {f"w{size}": _launch(path, folder / f"w{size}", size, overrides) for size in worlds}
        points = folder / "points"
        points.mkdir()
        arm(points, "forward", "kill", nth=KILLED_AT)
        found["kill"] = _launch(path, folder / "kill", max(worlds), overrides, {VARIABLE: str(points)})
        assert [one.name.partition(".")[0] for one in points.iterdir()] == ["forward"], "no worker came to the place"
        assert not (points / "forward").exists(), "no worker was killed"
    return found


def _job(name: str, base: Path) -> Job:
    """Return a job by its name; `lora` trains adapters of a random model that is written to a folder."""
    if name != "lora":
        return JOBS[name]
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).save_pretrained(base)
    return adapters(base)


def _launch(path: str, folder: Path, size: int, overrides: Sequence[str], environ: dict[str, str] | None = None) -> str:
    command = [
        sys.executable,
        "-m",
        "elastic_train.cli.main",
        "launch",
        path,
        "--ranks",
        str(size),
        "--run.dir",
        str(folder),
    ]
    done = subprocess.run(
        [*command, *overrides], env={**os.environ, **(environ or {})}, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return str(json.loads((folder / "result.json").read_text())["weights_sha256"])
