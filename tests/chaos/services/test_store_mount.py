"""A node's own mount of the commits: it can be made read-only, also for processes with their own mounts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from chaos.services.store_mount import NoMountError, mounted

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
