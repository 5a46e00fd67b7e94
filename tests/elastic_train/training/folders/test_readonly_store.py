"""A node that cannot write commits steps back and says why; the others lose only a few saves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.judge.evidence.run_files import collect
from chaos.services.store_mount import StoreMount, mounted
from rendezvous import EtcdServer
from tests.conftest import PATIENCE_S, begin, eventually
from tests.elastic_train.training.folders.test_folders import num_members
from tests.elastic_train.training.live.test_live import (
    STARTED,
    etcd,
    history,
    nothing_left,
    undisturbed,
    until_whole,
    weights,
    write_config,
)

__all__ = ["etcd", "nothing_left", "undisturbed"]  # fixtures
pytestmark = pytest.mark.process
NUM_STEPS = 150


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[StoreMount]:
    """One node's mount of the commit folder, which can be made read-only."""
    (tmp_path / "commits").mkdir()
    with mounted(tmp_path / "commits", tmp_path / "way") as made:
        yield made


def launch(folder: Path, etcd: EtcdServer, config: str, store: Path) -> Path:
    """Start a node with its commits at `store`; return its log."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv_backend=etcd", "--rdzv_conf=recovery=live,ttl=60"]
    command += [f"--rdzv_endpoint={etcd.endpoint}", f"--rdzv_id={folder.parent.name}", "--nnodes=2"]
    command += ["--nproc-per-node=1", "--max-restarts=50", "-m", "elastic_train", config]
    environ = {"ELASTIC_TRAIN__CHECKPOINT__URL": str(store)}
    STARTED.append(begin(command, folder / "node.log", environ))
    return folder / "node.log"


def leaders(run: Path) -> dict[int, int]:
    """Return the process that led each term."""
    return {line["term"]: line["pid"] for line in history(run) if str(line["op"]) == "form" and line["rank"] == 0}


def newest(store: Path) -> str:
    """Return the name of the newest commit."""
    return max((path.name for path in (store / "commits").glob("[0-9]*.json")), default="")


def test_a_leader_that_cannot_write_any_more_steps_back(
    tmp_path: Path, rows: Path, etcd: EtcdServer, mount: StoreMount, undisturbed: Callable[[int], object]
) -> None:
    """The node's mount becomes read-only: soon the other commits without it, and it continues to train with it.

    Without stepping back, ten saves would fail in a row and end the job.
    """
    known = tmp_path / "known"
    config = write_config(tmp_path, rows, NUM_STEPS, lane_ms=40.0, until=known)
    culprit = launch(tmp_path / "a", etcd, config, mount.folder)
    eventually(lambda: num_members(etcd, tmp_path.name) == 1, "the first node's registration")
    other = launch(tmp_path / "b", etcd, config, mount.store)
    until_whole(tmp_path / "run", 2)
    mount.set_readonly(is_readonly=True)
    eventually(lambda: "this node cannot write to" in culprit.read_text(), "the node that cannot write steps back")
    eventually(lambda: newest(mount.store) > "00000002", "commits of a world that it does not lead")
    known.touch()
    assert [job.wait(PATIENCE_S) for job in STARTED] == [0, 0]
    run = collect(tmp_path / "run")
    assert run.result is not None and run.result["step"] == NUM_STEPS
    assert weights(run) == undisturbed(NUM_STEPS)
    logs = [culprit.read_text(), other.read_text()]
    assert "Read-only file system" in logs[0]
    assert sum("this node cannot write to" in log for log in logs) == 1
    assert any("cannot write where the commits are" in log for log in logs)
    assert [line["world"] for line in run.of("form")][-1] == 2, "no rank is lost over it"
    (barred,) = run.of("unwritable")
    led = leaders(tmp_path / "run")
    assert barred["rank"] == 0 and led[max(led)] != led[1]
