"""Nodes with another run.dir, configuration or run id than the job's are rejected, and the first node continues."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.judge.evidence.run_files import collect
from rendezvous import EtcdServer
from rendezvous.torchelastic.standby import ForkedWorker
from tests.conftest import PATIENCE_S, eventually, write_rows
from tests.elastic_train.training.live.test_live import (
    ENDLESS,
    etcd,
    history,
    launch_alone,
    nothing_left,
    steps_of,
    undisturbed,
    until_whole,
    weights,
    write_config,
)

pytestmark = pytest.mark.process
__all__ = ["etcd", "nothing_left", "undisturbed"]  # fixtures


def launch(folder: Path, etcd: EtcdServer, config: str, run: str) -> ForkedWorker:
    """Start a node of one rank with its own run.dir; its output goes to `<run>.log`."""
    return launch_alone(folder, etcd, config, run, "--run.dir", str(folder / run))


def test_nodes_that_are_not_of_the_job_are_turned_away(
    tmp_path: Path, rows: Path, etcd: EtcdServer, undisturbed: Callable[[int], object]
) -> None:
    """They exit with 2 and say why, and the first node loses no step; also when they return alone.

    A node with its own store or with another run id does not join, so the world does not change. One with a copy of the
    store has the job's marker: it exits in its first world, and alone names the missing steps. So does one with another
    configuration or validation set.
    """
    config = write_config(tmp_path, rows, ENDLESS, lane_ms=10.0)
    first = launch(tmp_path, etcd, config, "a")
    until_whole(tmp_path / "a", 1)
    assert launch(tmp_path, etcd, config, "own").wait(PATIENCE_S) == 2
    assert "is not where this job keeps its commits" in (tmp_path / "own.log").read_text()
    here = ["--run.dir", str(tmp_path / "a")]
    (tmp_path / "twin").mkdir()  # its name is the other run id
    assert launch_alone(tmp_path / "twin", etcd, config, "node", *here).wait(PATIENCE_S) == 2
    said = (tmp_path / "twin" / "node.log").read_text()
    assert f"the job of run id {tmp_path.name!r}" in said and "is at work here" in said
    assert {line["term"] for line in history(tmp_path / "a") if line["op"] == "form"} == {1}
    eventually(lambda: any((tmp_path / "a").glob("commits/*.json")), "a commit")
    with contextlib.suppress(shutil.Error):  # files may be deleted during the copy
        shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert launch(tmp_path, etcd, config, "copy").wait(PATIENCE_S) == 2
    assert "so it is a copy or an old view of that folder" in (tmp_path / "copy.log").read_text()
    rest = ["--optimizer.clip_norm", "0.5", "--data.validation", str(write_rows(tmp_path / "rows", 101, seed=3))]
    assert launch_alone(tmp_path, etcd, config, "other", *here, *rest).wait(PATIENCE_S) == 2
    said = (tmp_path / "other.log").read_text()
    for why in ("optimizer.clip_norm is 0.5 here and 1.0 on rank 0: all nodes", "the validation set's digest is "):
        assert why in said, said
    eventually(lambda: newest(tmp_path / "a") > newest(tmp_path / "copy"), "a newer commit")
    first.send_signal(signal.SIGTERM)  # SIGTERM, as a killed node's lease would have to expire first
    assert first.wait(PATIENCE_S) == 75
    run = collect(tmp_path / "a")
    assert not run.of("rollback") and weights(run) == undisturbed(steps_of(run))
    for name in ("own", "copy"):
        assert launch(tmp_path, etcd, config, name).wait(PATIENCE_S) == 2
    assert "checkpoint.accept_loss=" in (tmp_path / "copy.log").read_text()
    assert not list((tmp_path / "own").glob("commits/*"))


def test_a_run_dir_that_is_removed_is_complete_again(tmp_path: Path, rows: Path, etcd: EtcdServer) -> None:
    """The next commit reports it; a node that joins afterwards is accepted and finds the first node's history."""
    config, folder = write_config(tmp_path, rows, ENDLESS, lane_ms=10.0), tmp_path / "a"
    launch(tmp_path, etcd, config, "a")
    until_whole(folder, 1)
    eventually(lambda: any(folder.glob("commits/*.json")), "a commit")
    folder.rename(tmp_path / "moved")
    said = "was changed while this job trains: store-id and terms/00000001.json were removed"
    eventually(lambda: said in (tmp_path / "a.log").read_text(), "the line")
    eventually(lambda: newest(folder) > newest(tmp_path / "moved"), "a commit after that")
    assert {path.name for path in folder.iterdir()} >= {"store-id", "terms", "config.yaml", "history", "head.json"}
    launch_alone(tmp_path, etcd, config, "b", "--run.dir", str(folder))
    until_whole(folder, 2)
    assert {line["term"] for line in history(folder) if line["op"] == "form"} == {1, 2}


def newest(run: Path) -> int:
    return max((int(path.stem.rpartition("-")[2]) for path in run.glob("commits/*.json")), default=0)


def test_two_nodes_that_begin_at_once_have_one_lineage(tmp_path: Path, rows: Path, etcd: EtcdServer) -> None:
    """One node is rejected in their first world or before; the other completes the job."""
    config = write_config(tmp_path, rows, 30, lane_ms=1.0)
    nodes = {run: launch(tmp_path, etcd, config, run) for run in ("a", "b")}
    codes = {run: node.wait(240) for run, node in nodes.items()}
    assert sorted(codes.values()) == [0, 2], [(tmp_path / f"{run}.log").read_text()[-2000:] for run in nodes]
    away = next(run for run, code in codes.items() if code == 2)
    assert not list((tmp_path / away).glob("commits/*"))
