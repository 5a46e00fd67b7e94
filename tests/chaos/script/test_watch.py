"""Grouping of an uninstrumented script's workers into worlds."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from chaos.script.watch import Worker, World


@pytest.mark.slow
def test_a_member_that_has_died_ends_its_world_before_it_is_reaped() -> None:
    """An agent checks its workers at intervals; until it reaps a dead one, the kernel keeps its pid."""
    with subprocess.Popen(["sleep", "600"]) as member:
        world = World(1, size=2, store="host:1", workers={0: Worker(member.pid, 0, 0, 2, "host:1", 1.0)})
        late = Worker(os.getpid(), 1, 1, 2, "host:1", 2.0)
        assert world.takes(late)
        member.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, member.pid, os.WEXITED | os.WNOWAIT)
        assert not world.takes(late)
