"""Evidence that a fault took effect, and none if it did not."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.real.acts.effects import (
    Effect,
    connected,
    counted,
    differs,
    gone,
    refuses,
    running,
    stopped,
    while_last,
)
from chaos.real.acts.job_view import Struck
from chaos.services.etcd_proxy import Proxies, Way
from tests.conftest import PATIENCE_S


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as started:
        yield started
        started.kill()


def comes_true(effect: Effect) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while (proof := effect()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return proof


def test_signals_that_did_nothing_prove_nothing(process: subprocess.Popen[bytes]) -> None:
    """An unaffected process is neither stopped nor gone."""
    pids = [process.pid]
    assert running(pids)() and stopped(pids)() is None and gone(pids)() is None
    os.kill(process.pid, signal.SIGSTOP)
    assert comes_true(Struck(pids, signal="SIGSTOP").proof) == "1 processes are stopped"
    assert gone(pids)() is None
    os.kill(process.pid, signal.SIGKILL)
    assert comes_true(Struck(pids, signal="SIGKILL").proof) == "1 processes have ended"
    assert running(pids)() is None and gone([])() is None, "whoever hits nobody proves nothing"
    assert stopped(pids)() is None, "it has ended, and is not stopped"


def test_a_fault_without_a_proof_is_no_fault() -> None:
    """An act without a proof of effect is an error at once, rather than a fault without a shown effect."""
    for signals, pids in ((None, [1]), ("SIGKILL", []), ("SIGUSR1", [1])):
        with pytest.raises(ValueError, match="what proves it"):
            Struck(pids, signal=signals)


def test_a_later_fault_does_not_prove_an_earlier_one() -> None:
    """Two faults of one cable share a counter: one replaced before it took effect has done nothing."""
    count, last = [0], [1]
    first = while_last(lambda: last[0] == 1, counted("packets were lost", lambda: count[0]))
    last[0], count[0] = 2, 5
    assert first() is None


def test_a_folder_has_to_refuse_for_the_reason_of_the_fault(tmp_path: Path) -> None:
    """A missing folder is neither full nor read-only, and a probe leaves nothing."""
    assert refuses(tmp_path, errno.ENOSPC) is None and list(tmp_path.iterdir()) == []
    assert refuses(tmp_path / "none", errno.ENOSPC) is None
    assert refuses(Path("/dev/full"), errno.ENOTDIR) == "writing there fails: Not a directory"


def test_a_process_has_to_hold_a_connection() -> None:
    """A process that listens, or has closed its connections, is not connected."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = int(listening.getsockname()[1])
        assert connected(lambda: [os.getpid()], {port})() is None
        with socket.create_connection(("127.0.0.1", port)):
            assert connected(lambda: [os.getpid()], {port})() == f"process {os.getpid()} is connected to etcd"
            assert connected(lambda: [os.getppid()], {port})() is None
        assert connected(lambda: [os.getpid()], {port})() is None


@pytest.mark.parametrize("spoil", [lambda path: path.write_bytes(b"xbc"), Path.unlink], ids=["flipped", "deleted"])
def test_a_file_has_to_read_otherwise(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    path, record = tmp_path / "file", tmp_path / "record"
    path.write_bytes(b"abc")
    record.touch()
    untouched = differs(path, b"abc", record)
    spoil(path)
    assert untouched() is None, "what happens later is not the fault's doing"
    assert differs(path, b"abc", record)() is not None


def test_a_commit_that_was_deleted_whole_proves_no_damage(tmp_path: Path) -> None:
    """Old commits are deleted in normal operation: their files are gone, and so is their record."""
    assert differs(tmp_path / "file", b"abc", tmp_path / "record")() is None


def test_a_proxy_that_nobody_uses_holds_nothing_back() -> None:
    """Only traffic that arrives during the hold proves it."""
    with socket.create_server(("127.0.0.1", 0)) as target:
        way = Way()
        proxies = Proxies("127.0.0.1", [f"127.0.0.1:{target.getsockname()[1]}"], [way])
        proxies.start()
        try:
            with socket.create_connection(("127.0.0.1", proxies.ports[0][0])) as client:
                effect = counted("chunks were held", lambda: way.num_held)
                way.requests_are_held = True
                assert effect() is None
                client.sendall(b"hello")
                assert comes_true(effect) == "1 chunks were held"
        finally:
            proxies.close()
