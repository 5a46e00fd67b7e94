"""A decoder of half a billion parameters: ten steps on four processes of this machine, resumed on three.

Its weights and its tokens are random. It is a job like any other, started by torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.figures import Effort
from benchmarks.jobs import tokens_of, write_config, write_rows
from elastic_train.tasks.causal_lm import CausalLM
from rendezvous.process_table import children_of

RANKS, STEPS, RESUMED_RANKS, MORE_STEPS = 4, 10, 3, 2
SIZES, DEPTH, TOKENS = {"vocabulary": 8192, "dim": 1024, "heads": 16}, 39, 17
LOOK_EVERY_S, TIMEOUT_S = 0.1, 1800.0


def half_billion(effort: Effort) -> dict[str, object]:
    """Return the peak memory of all the job's processes together, with shared pages counted once, and the outcome.

    `training` is the peak until the last step; the commit after it needs a second copy of each rank's share.
    """
    params = {"max_tokens": TOKENS, "model": {**SIZES, "depth": 4 if effort.is_quick else DEPTH}}
    with torch.device("meta"):
        model = CausalLM(**params).build_model()  # type: ignore[arg-type]
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = write_rows(folder / "rows", {"input_ids": tokens_of(200, TOKENS, SIZES["vocabulary"])}, group_rows=50)
        tree = {
            "task": {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": params},
            "batch": {"global_batch": RANKS, "micro_batch": 1},
            "parallel": {"shards": "parameters", "copies": 1},
            "tracking": {"mlflow_uri": None},
        }
        config = write_config(folder, rows, tree)
        first = _train(folder, config, RANKS, STEPS, effort.say)
        second = _train(folder, config, RESUMED_RANKS, STEPS + MORE_STEPS, effort.say)
        result = json.loads((folder / "run" / "result.json").read_text())
    peaks = {
        f"w{num_ranks}{phase}": round(num_bytes / 2**30, 2)
        for num_ranks, found in ((RANKS, first), (RESUMED_RANKS, second))
        for phase, num_bytes in zip(("_training", ""), found, strict=True)
    }
    facts = {"parameters": num_parameters, "steps": result["step"], "samples": result["coverage"]["count"]}
    return {"decoder_gib": {**peaks, **facts}}


def _train(folder: Path, config: str, num_ranks: int, steps: int, say: Callable[[str], None]) -> tuple[int, int]:
    """Train up to a step on `num_ranks` processes; return their joint peak bytes until that step and overall."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += ["-m", "elastic_train", config, "--max_steps", str(steps)]
    started, seen, log = time.monotonic(), list[tuple[float, int]](), folder / "log"
    with log.open("wb") as said:
        job = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while job.poll() is None:
            seen.append((time.time(), _memory_of(job.pid)))
            if time.monotonic() - started > TIMEOUT_S:
                raise TimeoutError(f"step {steps} did not come in {TIMEOUT_S:.0f} s:\n{log.read_text()}")
            time.sleep(LOOK_EVERY_S)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    if job.returncode:
        raise RuntimeError(f"{num_ranks} ranks ended with {job.returncode}:\n{log.read_text()}")
    lines = [json.loads(line) for path in (folder / "run" / "history").iterdir() for line in path.open()]
    last = max(line["t"] for line in lines if line["op"] == "step")
    training, ever = max(size for at, size in seen if at <= last), max(size for _, size in seen)
    took_s = time.monotonic() - started
    say(
        f"{num_ranks} ranks to step {steps}: {took_s:.0f} s, {training / 2**30:.2f} GiB, {ever / 2**30:.2f} with commit"
    )
    return training, ever


def _memory_of(pid: int) -> int:
    """Return the bytes of a process and its descendants, with shared pages divided among their users (PSS)."""
    total, left = 0, [pid]
    while left:
        one = left.pop()
        left += children_of(one)
        try:
            text = Path(f"/proc/{one}/smaps_rollup").read_text()
        except OSError:  # it has ended
            continue
        total += next((1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0)
    return total
