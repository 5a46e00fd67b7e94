"""Jobs for fault tests: plain DDP under any rendezvous, our trainer in live mode, and the steps their ranks log.

Both log one JSON line per step and rank, so that both are followed and judged in the same way.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from chaos.services.torchrun_node import Node, clean_environ
from elastic_train.data.corpora.synthetic import synthesise
from rendezvous.etcd.server import free_ports

TTL_S = 3.0
LOG = "steps.jsonl"
LIVE_LOGS = "history/[0-9]*.jsonl"
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a rank; `t` is in seconds since the epoch, `world` in ranks."""

    t: float
    world: int
    rank: int
    pid: int


class Steps:
    """The steps of a job, read as they are logged below its folder."""

    def __init__(self, folder: Path, logs: str) -> None:
        """`logs` is a pattern of file names: LOG for plain DDP, LIVE_LOGS for our trainer."""
        self._folder, self._logs = folder, logs
        self._places: dict[Path, int] = {}
        self._pids: dict[tuple[int, int], int] = {}
        self.newest: dict[int, Step] = {}
        """The last step of each rank."""

    def read(self) -> list[Step]:
        """Return the steps logged since the last call."""
        steps = [step for path in sorted(self._folder.glob(self._logs)) for step in self._read(path)]
        self.newest |= {step.rank: step for step in sorted(steps, key=lambda step: step.t)}
        return steps

    def first(
        self,
        is_meant: Callable[[Step], bool],
        *,
        of: int,
        timeout_s: float,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Step | None:
        """Return the earliest of `of` matching steps; None if fewer come in time or the job is over."""
        deadline = time.monotonic() + timeout_s
        found: list[Step] = []
        while len(found) < of:
            if time.monotonic() > deadline or is_over():
                return None
            time.sleep(_LOOK_EVERY_S)
            found += [step for step in self.read() if is_meant(step)]
        return min(found, key=lambda step: step.t)

    def _read(self, path: Path) -> Iterator[Step]:
        place = self._places.get(path, 0)
        with path.open("rb") as file:
            file.seek(place)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._places[path] = place + len(whole)
        for line in map(json.loads, whole.splitlines()):
            if line["op"] == "form":
                self._pids[line["term"], line["rank"]] = line["pid"]
            if line["op"] == "step":
                pid = line["pid"] if "pid" in line else self._pids[line["term"], line["rank"]]
                yield Step(line["t"], line["world"], line["rank"], pid)


def plain_nodes(folder: Path, flags: list[str], endpoint: str, *, max_restarts: int) -> list[Node]:
    """Describe two nodes of one rank each that run plain DDP; `flags` choose and configure the rendezvous."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", *flags, f"--rdzv_endpoint={endpoint}"]
    command += [f"--rdzv_id={folder.name}", "--nnodes=1:2", "--nproc-per-node=1", f"--max-restarts={max_restarts}"]
    command += ["-m", "benchmarks.recovery.plain_ddp", str(folder / LOG)]
    return [Node(turn, command, folder / f"node-{turn}.log", clean_environ(os.environ)) for turn in range(2)]


def write_live_job(folder: Path, ranks: int, changes: Mapping[str, object] | None = None) -> str:
    """Write data and a configuration that trains until asked to leave; return the configuration's path.

    `changes` are sections that replace those written here.
    """
    folder.mkdir(parents=True)
    synthesise(str(folder / "data"), 20_000, "quality", seed=1)
    params = {"max_tokens": 128, "dim": 96, "depth": 2, "heads": 4, "dropout": 0.1}
    tree: dict[str, object] = {
        "run": {"dir": str(folder / "run"), "seed": 3},
        "task": {"path": "elastic_train.tasks.text_classifier:TextClassifier", "params": params},
        "data": {"train": str(folder / "data"), "too_long": "truncate", "cache_dir": str(folder / "decoded")},
        "batch": {"global_batch": 16 * ranks, "micro_batch": 8},
        "optimizer": {"lr": 0.001, "warmup_steps": 10, "schedule": "constant"},
        "epochs": 100_000,
        "validation": {"every": None},
        "checkpoint": {"every": "200 steps", "keep_last": 2},
        "tracking": {"mlflow_uri": None},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**tree, **(changes or {})}))
    return str(path)


def free_endpoint() -> str:
    """Return a free endpoint of this machine."""
    return f"127.0.0.1:{free_ports(1)[0]}"


@contextlib.contextmanager
def folder_for(keep: Path | None) -> Iterator[Path]:
    """Yield a folder for the files of a benchmark's jobs: `keep`, which must be new, or a temporary one."""
    if keep is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    if keep.exists() and any(keep.iterdir()):
        raise SystemExit(
            f"--keep {keep}: an earlier run's files are there, and would count as this one's; name another"
        )
    yield keep
