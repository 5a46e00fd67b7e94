"""Cells over several nodes, with pipeline stages on different nodes: whole nodes are lost, and no bit differs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from chaos.judge.evidence.run_files import Evidence, collect
from chaos.judge.invariants.whole_run import check_kept
from rendezvous import EtcdServer
from rendezvous.process_table import pids, stat_of
from rendezvous.torchelastic.standby import ForkedWorker
from tests.conftest import PATIENCE_S, begin
from tests.elastic_train.training.jobs import result, succeed
from tests.elastic_train.training.live.test_live import (
    ENDLESS,
    JOB,
    STARTED,
    etcd,
    nothing_left,
    steps_of,
    until_whole,
    weights,
)
from tests.memory_job import start

__all__ = ["etcd", "nothing_left"]  # fixtures
pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


MODEL = {"vocabulary": 64, "dim": 16, "depth": 2, "heads": 2, "dropout": 0.1, "tied": False}


def write_config(folder: Path, rows: Path, steps: int, parallel: Mapping[str, object]) -> str:
    """Write the configuration of a language model; an endless job's lanes take longer."""
    params = {"model": MODEL, "max_tokens": 16, "lane_ms": 40.0 if steps == ENDLESS else 0.0}
    tree = {
        **JOB,
        "run": {"dir": str(folder / "run"), "seed": 5},
        "data": {"train": str(rows / "train"), "too_long": "truncate"},
        "validation": {},
        "task": {"path": "chaos.tasks.paced_language:PacedLanguage", "params": params},
        "parallel": parallel,
        "max_steps": steps,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return str(folder / "config.yaml")


class Nodes:
    """The nodes of a job, each with its own torchrun."""

    def __init__(self, folder: Path, etcd: EtcdServer, parallel: Mapping[str, object], rows: Path, ranks: int) -> None:
        self.folder, self._etcd, self._ranks = folder, etcd, ranks
        self._config = write_config(folder, rows, ENDLESS, parallel)
        self._up: list[tuple[ForkedWorker, Path]] = []
        self._num_started = 0

    def start(self, number: int) -> None:
        for _ in range(number):
            self._num_started += 1
            command = [sys.executable, "-m", "torch.distributed.run", "--rdzv_backend=etcd"]
            command += [f"--rdzv_endpoint={self._etcd.endpoint}", f"--rdzv_id={self.folder.name}"]
            command += ["--rdzv_conf=recovery=live,ttl=20", "--nnodes=1:8", f"--nproc-per-node={self._ranks}"]
            command += ["--max-restarts=50", "-m", "elastic_train", self._config]
            log = self.folder / f"node-{self._num_started}.log"
            self._up.append((begin(command, log), log))
            STARTED.append(self._up[-1][0])

    def kill(self, *workers: int) -> None:
        """Kill the nodes of the given workers with all their processes."""
        for worker in workers:
            lineage = {worker, *_ancestors(worker)}
            [hit] = [one for one in self._up if one[0].pid in lineage]
            self._up.remove(hit)
            node, _ = hit
            for pid in [node.pid, *(pid for pid in pids() if node.pid in _ancestors(pid))]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            node.wait(PATIENCE_S)

    def leave(self) -> Evidence:
        """Ask all nodes to leave; return the job's result."""
        for node, _ in self._up:
            node.send_signal(signal.SIGTERM)
        for node, _ in self._up:
            node.wait(PATIENCE_S)
        run = collect(self.folder / "run")
        assert run.result is not None, self.said
        return run

    @property
    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("node-*.log")))


def _ancestors(pid: int) -> Iterator[int]:
    """Yield the ancestors of a process."""
    while (stat := stat_of(pid)) is not None and stat.parent > 1:
        pid = stat.parent
        yield pid


def test_stages_on_nodes_of_their_own_that_are_lost_cost_no_applied_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer
) -> None:
    """Two cells of two nodes each, and a spare node, which replaces the first node that is lost.

    Then each cell loses a node with a different stage, and the remaining nodes form one cell. One more node is lost,
    and only the spare holds its stage until a new node joins. No step is lost.
    """
    nodes = Nodes(tmp_path, etcd, {"pipeline": 2, "schedule": "1f1b"}, rows, ranks=1)
    nodes.start(5)
    term, ranks = until_whole(tmp_path / "run", 4)
    nodes.kill(ranks[1])
    term, ranks = until_whole(tmp_path / "run", 4, above=term)
    nodes.kill(ranks[0], ranks[3])
    term, ranks = until_whole(tmp_path / "run", 2, above=term)
    nodes.start(2)
    term, ranks = until_whole(tmp_path / "run", 4, above=term)
    nodes.kill(ranks[2])
    term, ranks = until_whole(tmp_path / "run", 2, above=term)
    nodes.start(1)
    term, _ = until_whole(tmp_path / "run", 4, above=term)
    assert "Traceback" not in nodes.said and "2 cells of 2 ranks" in nodes.said, nodes.said
    run = nodes.leave()
    check_kept(run)
    restored = [line for line in run.of("restore") if int(str(line["term"])) > 1]
    assert restored and all(int(str(line["step"])) > 0 for line in restored) and not run.of("rollback")
    succeed(start([write_config(tmp_path / "alone", rows, steps_of(run), {})]))
    assert weights(run) == result(tmp_path / "alone")["weights_sha256"]
