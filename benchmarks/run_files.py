"""The cost per step of lines in history and metrics, and of a folder that hangs.

python -m benchmarks.run_files. A step computes for a millisecond and then writes its lines, as rank 0 does. Lines
written by the call itself are compared with lines written by a thread, to a folder that answers and to one that hangs
(a FIFO without a reader instead of the history).
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from elastic_train.tracking.background_files import Act, BackgroundFiles
from elastic_train.tracking.history import History
from elastic_train.tracking.metric_log import MetricsWriter, metrics_path

NUM_STEPS = 2000
WORK_S = 1e-3
VALUES = {"train/loss": 0.25, "train/gradient_norm": 1.5, "train/learning_rate": 1e-3, "train/samples_per_s": 1234.5}


class InTheCall(BackgroundFiles):
    """Writes every line before the call returns."""

    def put(self, act: Act) -> None:
        act()


def costs(files: BackgroundFiles, folder: Path, *, hangs: bool = False) -> tuple[list[float], float]:
    """Return the seconds that each step spent on its lines, and the seconds of the whole loop."""
    history = History(files, folder, 1, 0)
    metrics = MetricsWriter(files.lines(metrics_path(folder, 1)), 1)
    if hangs:
        (folder / "history").mkdir(parents=True)
        os.mkfifo(folder / "history" / f"00000001-00000-{os.getpid()}.jsonl")
    a, spent, began = torch.ones(64, 64), list[float](), time.perf_counter()
    for step in range(NUM_STEPS):
        until = time.perf_counter() + WORK_S
        while time.perf_counter() < until:
            a = a @ a / 64.0
        started = time.perf_counter()
        history.step(step=step, epoch=0, lo=step, hi=step + 1, lanes=range(8), num_samples=64, world=8, loss=0.25)
        metrics.values(step, VALUES, {})
        spent.append(time.perf_counter() - started)
    return spent, time.perf_counter() - began


def main() -> int:
    """Print a table: the cost of a step's lines in microseconds, and the loop in milliseconds per step."""
    torch.set_num_threads(1)
    sys.stdout.write("lines are written        p50 us  p99 us  max us  loop ms/step\n")
    for name, files, hangs in (
        ("in the call", InTheCall(), False),
        ("by a thread", BackgroundFiles(), False),
        ("by a thread that hangs", BackgroundFiles(), True),
    ):
        with tempfile.TemporaryDirectory() as folder:
            spent, loop_s = costs(files, Path(folder) / "run", hangs=hangs)
        p99 = statistics.quantiles(spent, n=100)[98]
        row = (statistics.median(spent), p99, max(spent))
        shown = "".join(f"{1e6 * seconds:8.0f}" for seconds in row)
        sys.stdout.write(f"{name:<23}{shown}{1e3 * loop_s / NUM_STEPS:14.3f}\n")
    sys.stdout.flush()
    os._exit(0)  # a thread hangs in the FIFO


if __name__ == "__main__":
    sys.exit(main())
