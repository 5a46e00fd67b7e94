"""Acts that took effect prove it, and acts that did nothing prove nothing."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaos.real.acts import etcd, network, processes, storage
from chaos.real.acts.job_view import JobView, Struck
from chaos.scenario.schedule import Due
from chaos.services import neighbours
from chaos.services.etcd_cluster import EtcdCluster
from chaos.services.freezing_disk import FreezingDisk
from chaos.services.network.namespace import Cable
from chaos.services.store_mount import StoreMount, mounted
from chaos.services.surroundings import OwnData
from rendezvous.process_table import stat_of
from tests.conftest import PATIENCE_S, eventually, write_rows

pytestmark = pytest.mark.slow

BITES = pytest.mark.parametrize("bites", [True, False], ids=["bites", "does nothing"])


def job(*nodes: object, **around: object) -> JobView:
    """Return a job with these nodes and environment, as an act sees it."""
    nothing: dict[str, object] = {"freezing": [], "disk": None}
    return SimpleNamespace(nodes=list(nodes), around=SimpleNamespace(**(nothing | around)))  # type: ignore[return-value]


def node(process: subprocess.Popen[bytes]) -> Any:
    return SimpleNamespace(number=0, is_up=True, agent=process.pid, pids=lambda: [process.pid])


@contextlib.contextmanager
def sleeping(*where: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that sleeps in the environment of the preceding command; return once it is there."""
    with subprocess.Popen([*where, "sleep", "600"]) as process:
        try:
            eventually(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
            yield process
        finally:
            process.kill()


def undo(done: Struck) -> None:
    assert done.undo is not None
    eventually(lambda: done.undo is None or done.undo() is not None)


@BITES
def test_a_write_of_our_own_waits_for_the_thaw(
    disk: FreezingDisk, monkeypatch: pytest.MonkeyPatch, *, bites: bool
) -> None:
    """Until the thaw nothing is proven; a write that ended earlier was not delayed by the fault."""
    if not bites:
        monkeypatch.setattr(disk, "freeze", lambda: None)
    done = storage.freeze_fs(job(freezing=[disk]), Due("freeze_fs", None, None, 0.0, for_s=1.0))
    assert done is not None
    eventually(lambda: bites or not [thread for thread in threading.enumerate() if thread.name == "held write"])
    assert done.proof() is None
    undo(done)
    if bites:
        eventually(done.proof)
    assert (done.proof() is not None) == bites
    eventually(lambda: list(disk.folder.iterdir()) == [])


def test_nothing_writes_to_a_frozen_file_system(disk: FreezingDisk, tmp_path: Path) -> None:
    """Other storage faults wait until it is over: a write by the executor would delay the thaw as well."""
    seen, due = job(freezing=[disk], disk=disk.folder), Due("storage_full", None, None, 0.0, for_s=1.0)
    full = storage.storage_full(seen, due)
    assert full is not None and full.proof() == "writing there fails: No space left on device"
    undo(full)
    frozen = storage.freeze_fs(seen, due)
    assert frozen is not None
    assert storage.storage_full(seen, due) is None and storage.freeze_fs(seen, due) is None
    undo(frozen)
    eventually(frozen.proof)


@BITES
@pytest.mark.xdist_group("network")
def test_a_node_has_to_know_itself_by_a_loopback_address(
    monkeypatch: pytest.MonkeyPatch, laid: Cable, *, bites: bool
) -> None:
    """The machine's name must resolve to it in the node's own mounts while the fault lasts."""
    if not bites:
        monkeypatch.setattr(Cable, "misname", lambda laid: None)
    with sleeping(*laid.command([])) as process:
        done = network.hosts_file(job(node(process), cable=laid), Due("hosts_file", 0, None, 0.0, for_s=1.0))
        assert done is not None
        assert (done.proof() is not None) == bites
        undo(done)
        assert done.proof() is None


@BITES
def test_a_node_has_to_be_refused_by_its_own_mounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, bites: bool
) -> None:
    """A node whose own mounts let it write to the folder is not hit, whatever this process sees."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    store = tmp_path / "store"
    store.mkdir()
    if not bites:
        monkeypatch.setattr(StoreMount, "_others", lambda way: [])
    with mounted(store, tmp_path / "way") as way, sleeping("unshare", "--mount") as process:
        done = storage.readonly_dir(job(node(process), ways={0: way}), Due("readonly_dir", 0, None, 0.0, for_s=1.0))
        assert done is not None and way.is_readonly
        assert (done.proof() is not None) == bites
        undo(done)


@BITES
def test_data_that_is_away_has_to_be_gone(tmp_path: Path, *, bites: bool) -> None:
    """Twice at once is once: the second fault does nothing."""
    data = OwnData(str(write_rows(tmp_path / "train", 20)), tmp_path / "dataset")
    due = Due("data_outage", None, None, 0.0, for_s=1.0)
    done = storage.data_outage(job(data=data), due)
    assert (
        done is not None and data.spoil(random.Random(1)) is None and storage.data_outage(job(data=data), due) is None
    )
    if not bites:
        (tmp_path / "dataset").symlink_to(tmp_path / "dataset.away")
    assert (done.proof() is not None) == bites
    (tmp_path / "dataset").unlink(missing_ok=True)
    undo(done)
    assert done.proof() is None and data.spoil(random.Random(1)) is not None


@BITES
def test_a_slow_disk_holds_a_write_of_our_own_for_a_while(
    disk: FreezingDisk, monkeypatch: pytest.MonkeyPatch, *, bites: bool
) -> None:
    """The write ends late, while the fault lasts; afterwards writes are as fast as before."""
    if not bites:
        monkeypatch.setattr(disk, "stutter", lambda frozen_s, open_s: None)
        monkeypatch.setattr(storage, "_FROZEN_S", 2 * PATIENCE_S)  # even a busy disk is faster
    due = Due("slow_disk", None, None, 0.0, for_s=1.0)
    done = storage.slow_disk(job(freezing=[disk]), due)
    assert done is not None
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name == "held write"])
    assert (done.proof() is not None) == bites
    assert disk.is_frozen == bites, "other faults of the storage do not come between"
    assert bites == (storage.storage_full(job(freezing=[disk], disk=disk.folder), due) is None)
    undo(done)
    assert not disk.is_frozen
    (disk.folder / "written").write_text("at once")


@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "sleeping"])
def test_a_worker_has_to_wait_for_the_core_that_it_shares(*, is_busy: bool) -> None:
    """A process that computes waits for its neighbours; a sleeping one was not slowed. Then it has all cores again."""
    program = "while True: pass" if is_busy else "import time; print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as worker:
        try:
            if not is_busy:  # it has computed until then, and may have waited
                assert worker.stdout is not None and worker.stdout.readline()
                eventually(lambda: (stat := stat_of(worker.pid)) is not None and stat.state == "S")
            cores = os.sched_getaffinity(worker.pid)
            seen = job(node(worker))
            seen.followed = SimpleNamespace(pids={0: worker.pid})  # type: ignore[assignment]
            done = processes.slow_cpu(seen, Due("slow_cpu", 0, None, 0.0, for_s=1.0))
            assert done is not None and len(os.sched_getaffinity(worker.pid)) == 1
            if is_busy:
                eventually(done.proof)
            else:
                assert done.proof() is None
            undo(done)
            assert os.sched_getaffinity(worker.pid) == cores
        finally:
            worker.kill()


@BITES
def test_memory_has_to_be_held_by_the_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, bites: bool
) -> None:
    """The kernel's count of its memory decides; a program that has touched no memory yet holds none."""
    monkeypatch.setattr(neighbours, "_MOST_BYTES", 256 << 20)
    monkeypatch.setattr(processes, "_COMING_S", PATIENCE_S)
    gate = tmp_path / "gate"
    waits = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    monkeypatch.setattr(neighbours, "_HUNGRY", waits + neighbours._HUNGRY)
    with sleeping() as process:
        done = processes.memory_pressure(job(node(process)), Due("memory_pressure", 0, None, 0.0, for_s=1.0))
        assert done is not None
        assert done.undo is not None and done.proof() is None, "it has just begun"
        if bites:
            gate.touch()
            undo(done)
            assert done.proof() is not None, "it was not ended before"
        else:
            assert done.undo() is None, "it is waited for"
            with monkeypatch.context() as later:
                later.setattr(processes.time, "monotonic", lambda: float("inf"))
                assert done.undo() == [] and done.proof() is None


@BITES
def test_etcd_has_to_have_forgotten(monkeypatch: pytest.MonkeyPatch, *, bites: bool) -> None:
    """Members that ended and returned with their data have not lost it."""
    with EtcdCluster(1) as cluster:
        if not bites:
            monkeypatch.setattr(cluster, "delete_data", lambda: None)
        done = etcd.lose_etcd_data(job(etcd=cluster), Due("lose_etcd_data", None, None, 0.0, for_s=1.0))
        assert done is not None and done.proof() is None, "they are away"
        undo(done)
        if bites:
            eventually(done.proof)
        else:
            cluster.leader()
            assert done.proof() is None
