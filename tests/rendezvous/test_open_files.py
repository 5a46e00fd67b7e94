"""The limit of open files: raised as far as possible, with a warning if that is too low."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys

import pytest

from rendezvous import open_files
from rendezvous.open_files import make_room_for, raise_limit


class Limits:
    """A fake of the kernel's limits."""

    RLIM_INFINITY, RLIMIT_NOFILE = resource.RLIM_INFINITY, resource.RLIMIT_NOFILE

    def __init__(self, soft: int, hard: int) -> None:
        self.now = soft, hard

    def getrlimit(self, _: int) -> tuple[int, int]:
        return self.now

    def setrlimit(self, _: int, wanted: tuple[int, int]) -> None:
        self.now = wanted


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, 4096),
        (4096, 4096, 4096),
        (1024, resource.RLIM_INFINITY, 1 << 20),
        (1 << 21, 1 << 22, 1 << 21),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1 << 20),
    ],
)
def test_the_soft_limit_becomes_the_hard_one(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int
) -> None:
    """Never lower than before."""
    limits = Limits(soft, hard)
    monkeypatch.setattr(open_files, "resource", limits)
    assert raise_limit() == raised
    assert limits.now[0] in (raised, soft)


def test_a_limit_that_is_too_low_for_the_world_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning says what to raise; a world that fits needs none."""
    monkeypatch.setattr(open_files, "resource", Limits(1024, 1024))
    with caplog.at_level(logging.WARNING):
        make_room_for(100)
        assert not caplog.records
        make_room_for(1000)
        make_room_for(1000)
    (record,) = caplog.records
    assert "may open 1024 files, and a world of 1000 ranks needs about 2256" in record.getMessage()


PRINTS = """
import os, sys
from rendezvous.open_files import fill_standard_streams
fill_standard_streams()
if sys.argv[1] == "closed":
    reads, writes = os.pipe()
    os.close(reads)
    os.dup2(writes, 1)
for _ in range(3):
    print("from a task", flush=True)
sys.stdout.flush()
assert all(os.fstat(number) for number in range(3))
print("the end", file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize(("redirection", "said"), [("closed", "standard output is closed (Broken pipe)"), (">&-", "")])
def test_what_prints_outlives_its_standard_output(redirection: str, said: str) -> None:
    """A closed reader, as in `| head`, and a process that was started without standard output."""
    shell = f'exec "$0" -c "$1" closed {"" if redirection == "closed" else redirection}'
    shell = shell if redirection == "closed" else shell.replace(" closed", " none")
    done = subprocess.run(
        ["sh", "-c", shell, sys.executable, PRINTS],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == (f"{said}; training continues\n" if said else "") + "the end\n"
