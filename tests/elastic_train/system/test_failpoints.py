"""Failpoints: the n-th comer has the fault, one and only one, in whatever processes and threads they come."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from elastic_train.system import failpoints
from elastic_train.system.failpoints import arm, disarm, reach


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(failpoints, "_folder", tmp_path)
    return tmp_path


def comes() -> bool:
    """Come to a place; say whether the fault was here."""
    try:
        reach("apply")
    except RuntimeError:
        return True
    return False


def test_an_unarmed_failpoint_does_nothing() -> None:
    assert not comes()


@pytest.mark.parametrize("nth", [1, 2, 9, 11])
def test_the_nth_arrival_has_the_fault(folder: Path, nth: int) -> None:
    """Earlier and later arrivals pass; the file that armed the place is renamed after the process."""
    arm(folder, "apply", "raise", nth)
    assert [comes() for _ in range(nth + 3)] == [*[False] * (nth - 1), True, *[False] * 3]
    assert [path.name.split(".")[0] for path in folder.iterdir()] == ["apply"]
    assert not (folder / "apply").exists()


def test_a_fault_for_one_process_is_not_anothers(folder: Path) -> None:
    """Only its arrivals count: a worker is hit where another one comes by first."""
    arm(folder, "apply", "raise", 2, only=os.getpid() + 1)
    assert not any(comes() for _ in range(3))
    arm(folder, "apply", "raise", 2, only=os.getpid())
    assert [comes() for _ in range(3)] == [False, True, False]


def test_exactly_one_of_many_concurrent_arrivals_has_the_fault(folder: Path) -> None:
    """Comers at the same time are counted one by one, also those that arrive while it is taken away."""
    with ThreadPoolExecutor(8) as pool:
        for nth in (1, 5, 16):
            arm(folder, "apply", "raise", nth)
            assert sum(pool.map(lambda _: comes(), range(16))) == 1


def test_a_disarmed_fault_does_not_happen(folder: Path) -> None:
    """Disarming returns whether it was in time."""
    arm(folder, "apply", "raise")
    assert disarm(folder, "apply")
    assert not comes()
    assert not disarm(folder, "apply")


@pytest.mark.parametrize(("kind", "number"), [("full", errno.ENOSPC), ("eio", errno.EIO)])
def test_a_failing_sync_raises_the_systems_error(folder: Path, kind: str, number: int) -> None:
    """A sync of the real disk fails as a full or a broken one does."""
    from elastic_train.checkpoint.stores.disk import RealDisk

    arm(folder, "sync", kind)
    disk = RealDisk()
    with disk.create(folder / "file") as file, pytest.raises(OSError) as caught:
        disk.sync([file], [])
    assert caught.value.errno == number


def test_a_device_runs_out_of_memory(folder: Path) -> None:
    """With torch's own error, which is of the same kind as that of a lost peer."""
    arm(folder, "reduce", "oom")
    with pytest.raises(torch.OutOfMemoryError, match="planted at reduce"):
        reach("reduce")


def test_a_fork_reads_its_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is a fork of a process that had another one, or had none."""
    monkeypatch.setattr(failpoints, "_folder", None)
    arm(tmp_path, "data", "raise")
    monkeypatch.setenv(failpoints.VARIABLE, str(tmp_path))
    reach("data")
    if (pid := os.fork()) == 0:
        try:
            reach("data")
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
