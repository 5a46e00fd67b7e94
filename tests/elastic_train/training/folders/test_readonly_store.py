"""A node that cannot write commits steps back and says why; the others lose only a few saves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.judge.evidence.run_files import collect
from chaos.services.store_mount import StoreMount, mounted
from rendezvous import EtcdServer
from tests.conftest import PATIENCE_S, begin
from tests.elastic_train.training.folders.test_folders import num_members
from tests.elastic_train.training.live.test_live import (
    STARTED,
    etcd,
    eventually,
    history,
    nothing_left,
    undisturbed,
    until_whole,
    weights,
    write_config,
)

__all__ = ["etcd", "nothing_left", "undisturbed"]  # fixtures
pytestmark = pytest.mark.slow
NUM_STEPS = 150


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[StoreMount]:
    """One node's mount of the commit folder, which can be made read-only."""
    (tmp_path / "commits").mkdir()
    with mounted(tmp_path / "commits", tmp_path / "way") as made:
        yield made


def launch(folder: Path, etcd: EtcdServer, config: str, store: Path, *more: str, nnodes: str = "1:2") -> Path:
    """Start a node with its commits at `store`; return its log."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv_backend=etcd"]
    command += [f"--rdzv_endpoint={etcd.endpoint}", f"--rdzv_id={folder.parent.name}", f"--nnodes={nnodes}", *more]
    command += ["--nproc-per-node=1", "--max-restarts=50", "-m", "elastic_train", config]
    environ = {"ELASTIC_TRAIN__CHECKPOINT__URL": str(store)}
    STARTED.append(begin(command, folder / "node.log", environ))
    return folder / "node.log"


LIVE = "--rdzv_conf=recovery=live,ttl=60"


def launch_two(
    folder: Path, etcd: EtcdServer, config: str, first: Path, second: Path, nnodes: str = "2", more: str = LIVE
) -> list[Path]:
    """Start two nodes, the leader first; return their logs."""
    logs = [launch(folder / "a", etcd, config, first, more, nnodes=nnodes)]
    eventually(lambda: num_members(etcd, folder.name) == 1, "the first node's registration")
    return [*logs, launch(folder / "b", etcd, config, second, more, nnodes=nnodes)]


def leaders(run: Path) -> dict[int, int]:
    """Return the process that led each term."""
    return {line["term"]: line["pid"] for line in history(run) if str(line["op"]) == "form" and line["rank"] == 0}


def newest(store: Path) -> str:
    """Return the name of the newest commit."""
    return max((path.name for path in (store / "commits").glob("[0-9]*.json")), default="")


@pytest.mark.parametrize("bad", ["leader", pytest.param("other", marks=pytest.mark.long)])
def test_a_node_that_cannot_write_any_more_steps_back(
    tmp_path: Path, rows: Path, etcd: EtcdServer, mount: StoreMount, bad: str, undisturbed: Callable[[int], object]
) -> None:
    """The node's mount becomes read-only: soon the others commit without it, and it continues to train with them.

    Without stepping back, ten saves would fail in a row and end the job.
    """
    known = tmp_path / "known"
    config = write_config(tmp_path, rows, NUM_STEPS, lane_ms=40.0, until=known)
    if bad == "other":  # the state is large enough for it to write a part
        Path(config).write_text(Path(config).read_text().replace("dim: 16", "dim: 256"))
    first, second = (mount.folder, mount.store) if bad == "leader" else (mount.store, mount.folder)
    logs = launch_two(tmp_path, etcd, config, first, second)
    until_whole(tmp_path / "run", 2)
    mount.set_readonly(is_readonly=True)
    culprit = logs[0 if bad == "leader" else 1]
    eventually(lambda: "this node cannot write to" in culprit.read_text(), "the node that cannot write steps back")
    eventually(lambda: newest(mount.store) > "00000002", "commits of a world that it does not lead")
    known.touch()
    assert [job.wait(PATIENCE_S) for job in STARTED] == [0, 0]
    run = collect(tmp_path / "run")
    assert run.result is not None and run.result["step"] == NUM_STEPS
    assert bad == "other" or weights(run) == undisturbed(NUM_STEPS)
    assert "Read-only file system" in culprit.read_text()
    assert sum("this node cannot write to" in log.read_text() for log in logs) == 1
    assert any("cannot write where the commits are" in log.read_text() for log in logs)
    assert [line["world"] for line in run.of("form")][-1] == 2, "no rank is lost over it"
    (barred,) = run.of("unwritable")
    led = leaders(tmp_path / "run")
    assert (barred["rank"] == 0) == (bad == "leader") == (led[max(led)] != led[1])


@pytest.mark.long
def test_a_leader_that_can_never_write_lets_another_one_lead(
    tmp_path: Path, rows: Path, etcd: EtcdServer, mount: StoreMount, undisturbed: Callable[[int], object]
) -> None:
    """It registered first, and its world cannot even claim a term.

    Otherwise it would try ten times and exit, and the job would start only once its agent had started another worker.
    """
    mount.set_readonly(is_readonly=True)
    config = write_config(tmp_path, rows, 60)
    launch_two(tmp_path, etcd, config, mount.folder, mount.store)
    assert [job.wait(PATIENCE_S) for job in STARTED] == [0, 0]
    assert weights(collect(tmp_path / "run")) == undisturbed(60)
    log = (tmp_path / "a" / "node.log").read_text()
    assert log.count("could not begin") == 1 and "another is started in its place" not in log


@pytest.mark.long
def test_a_mount_that_is_mended_is_used_again(tmp_path: Path, rows: Path, etcd: EtcdServer, mount: StoreMount) -> None:
    """The next world tries the mount again: the node writes a part, and may lead."""
    config = write_config(tmp_path, rows, 100_000, lane_ms=20.0)
    launch_two(tmp_path, etcd, config, mount.folder, mount.store, nnodes="1:2")
    until_whole(tmp_path / "run", 2)
    mount.set_readonly(is_readonly=True)
    log = tmp_path / "a" / "node.log"
    eventually(lambda: "this node cannot write to" in log.read_text(), "the node that cannot write steps back")
    mount.set_readonly(is_readonly=False)
    before = max(leaders(tmp_path / "run"))
    STARTED[1].kill()  # the next world consists of the recovered node alone
    STARTED[1].wait()
    eventually(lambda: max(leaders(tmp_path / "run")) > before, "a world of the mended node")
    held = newest(mount.store)
    eventually(lambda: newest(mount.store) > held, "commits of the mended node")


@pytest.mark.long
def test_in_restart_mode_the_node_ends_with_2(
    tmp_path: Path, rows: Path, etcd: EtcdServer, mount: StoreMount, undisturbed: Callable[[int], object]
) -> None:
    """Its agent does not restart it, and the others continue from the newest commit."""
    config = write_config(tmp_path, rows, NUM_STEPS, lane_ms=40.0)
    more = "--rdzv_conf=ttl=2,last_call_timeout=60"
    logs = launch_two(tmp_path, etcd, config, mount.folder, mount.store, nnodes="1:2", more=more)
    until_whole(tmp_path / "run", 2)
    mount.set_readonly(is_readonly=True)
    assert STARTED[0].wait(PATIENCE_S) != 0
    assert "error: this node cannot write to" in logs[0].read_text()
    assert STARTED[1].wait(PATIENCE_S) == 0
    assert weights(collect(tmp_path / "run")) == undisturbed(NUM_STEPS)
