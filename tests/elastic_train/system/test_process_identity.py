"""Which process runs: a process id says little, since ids come again and the dead keep theirs until they are reaped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_train.system.process_identity import is_alive, process_identity

pytestmark = pytest.mark.slow


def test_a_process_is_alive_until_it_ends_reaped_or_not() -> None:
    """In a container without an init nobody reaps what was killed: a job that left such a process has ended."""
    mine = process_identity()["born"]
    assert isinstance(mine, int) and is_alive(os.getpid(), mine) and not is_alive(os.getpid(), mine + 1)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    born = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    assert is_alive(process.pid, born)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped
    assert not is_alive(process.pid, born)
    process.communicate()
    assert not is_alive(process.pid, born)
