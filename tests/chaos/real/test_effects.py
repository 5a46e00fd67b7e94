"""What shows that a fault bit, and that nothing does where it did not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.real.acts.effects import Effect, counted, differs, gone, running, stopped
from chaos.real.acts.outcome import Struck
from chaos.services.etcd_proxy import Proxies, Way

DEADLINE_S = 20.0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as started:
        yield started
        started.kill()


def comes_true(effect: Effect) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while (proof := effect()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return proof


def test_signals_that_did_nothing_prove_nothing(process: subprocess.Popen[bytes]) -> None:
    """A process that was not hit is neither stopped nor gone."""
    pids = [process.pid]
    assert running(pids)() and stopped(pids)() is None and gone(pids)() is None
    os.kill(process.pid, signal.SIGSTOP)
    assert comes_true(Struck(pids, signal="SIGSTOP").proof) == "1 processes are stopped"
    assert gone(pids)() is None
    os.kill(process.pid, signal.SIGKILL)
    assert comes_true(Struck(pids, signal="SIGKILL").proof) == "1 processes have ended"
    assert running(pids)() is None and gone([])() is None, "whoever hits nobody proves nothing"


@pytest.mark.parametrize("spoil", [lambda path: path.write_bytes(b"xbc"), Path.unlink], ids=["flipped", "deleted"])
def test_a_file_has_to_read_otherwise(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    effect = differs(path, b"abc")
    assert effect() is None
    spoil(path)
    assert effect() is not None


def test_a_proxy_that_nobody_uses_holds_nothing_back() -> None:
    """Only what comes while it holds shows that it does."""
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
