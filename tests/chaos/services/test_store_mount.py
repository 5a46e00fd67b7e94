"""A node's own mount of the commits: it can be made read-only, also for processes with their own mounts."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest

from chaos.real.runs import clear
from chaos.services import store_mount
from chaos.services.store_mount import NoMountError, mounted
from chaos.services.surroundings import _ways

pytestmark = pytest.mark.slow

WRITER = """
for line in open(0):
    try:
        open(line.strip(), "w").close()
        print("written", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


def test_a_process_with_mounts_of_its_own_is_refused_and_let_write_again(tmp_path: Path) -> None:
    """Changes to other processes' mounts do not propagate to it, as with a node in a network namespace."""
    (tmp_path / "store").mkdir()
    try:
        with mounted(tmp_path / "store", tmp_path / "way") as way:
            command = ["unshare", "--mount", "--propagation", "slave", "python3", "-c", WRITER]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node:
                assert node.stdin is not None and node.stdout is not None
                answers = []
                for number, is_readonly in enumerate((False, True, False)):
                    way.set_readonly(is_readonly=is_readonly)
                    print(tmp_path / "way" / str(number), file=node.stdin, flush=True)
                    answers.append(node.stdout.readline().strip())
                node.stdin.close()
    except NoMountError as error:
        pytest.skip(str(error))
    assert answers == ["written", "Read-only file system", "written"]
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["0", "2"]


def test_a_machine_that_permits_no_mounts_keeps_no_folders_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user without root has runs that leave such faults out; their end, and the next run, find nothing in the way."""

    def refuse(*_: str) -> None:
        raise NoMountError("mount: must be superuser to use mount.")

    monkeypatch.setattr(store_mount, "run_as_root", refuse)
    (tmp_path / "faulted").mkdir()
    for _ in range(2):
        with contextlib.ExitStack() as undo, contextlib.suppress(NoMountError):
            _ways(undo, tmp_path / "faulted", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["faulted"]


def test_mounts_that_a_killed_run_has_left_are_cleared_away(tmp_path: Path) -> None:
    """SIGKILL takes nothing away: the next run in that folder begins all the same."""
    (tmp_path / "run" / "faulted").mkdir(parents=True)
    (tmp_path / "run" / "faulted" / "result.json").touch()
    killed = contextlib.ExitStack()
    try:
        _ways(killed, tmp_path / "run" / "faulted", 2)
    except NoMountError as error:
        pytest.skip(str(error))
    clear(tmp_path / "run")
    killed.pop_all()
    assert list((tmp_path / "run").iterdir()) == []
