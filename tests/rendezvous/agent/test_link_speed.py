"""Measuring the link to a node's agent: fast and slow links, from both ends, and addresses without an agent."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from rendezvous.agent import link_speed
from rendezvous.agent.identity import IdentityPort, ask, split_endpoint
from rendezvous.agent.link_speed import MEASURE, LinkSpeed, measure_link
from tests.conftest import PATIENCE_S

_AGENT = f"""
import sys
from rendezvous.agent import link_speed
from rendezvous.agent.identity import IdentityPort
link_speed.SERVE_S = {PATIENCE_S}
print(IdentityPort("127.0.0.1", "node-a").endpoint, flush=True)
sys.stdin.read()
"""
SLOW = 1_000_000
"""Bytes per second over a slow link."""


@pytest.fixture
def agent() -> Iterator[str]:
    """The endpoint of an agent in its own process."""
    with subprocess.Popen([sys.executable, "-c", _AGENT], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[IdentityPort]:
    """The port of an agent in this process, with timeouts for a busy machine."""
    monkeypatch.setattr(link_speed, "ANSWER_S", PATIENCE_S)
    monkeypatch.setattr(link_speed, "SERVE_S", PATIENCE_S)
    port = IdentityPort("127.0.0.1", "node-a")
    yield port
    port.close()


def pass_slowly(source: socket.socket, target: socket.socket, rate: float) -> None:
    with contextlib.suppress(OSError):
        while read := source.recv(1 << 14):
            time.sleep(len(read) / rate)
            target.sendall(read)
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def slow_link(endpoint: str, *, to: float = 1e12, back: float = 1e12) -> Iterator[tuple[str, int]]:
    """Relay an address to an endpoint with at most so many bytes per second in each direction."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    far = socket.create_connection(split_endpoint(endpoint))
                    for arguments in ((near, far, to), (far, near, back)):
                        threading.Thread(target=pass_slowly, args=arguments, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[:2]
        listener.shutdown(socket.SHUT_RDWR)


def measured(endpoint: tuple[str, int]) -> LinkSpeed:
    """Measure once the agent is free: it releases a caller shortly after the caller's last result."""
    deadline = time.monotonic() + PATIENCE_S
    while (speed := measure_link(endpoint, "node-a")) is None:
        assert time.monotonic() < deadline, "the agent does not measure"
    return speed


def until_it_measures(endpoint: str) -> socket.socket:
    """Return a connection on which the agent waits for a measurement; it closes others while it is busy."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        stranger = socket.create_connection(split_endpoint(endpoint), timeout=PATIENCE_S)
        stranger.sendall(f"{MEASURE} abc\n".encode())
        if stranger.recv(100):
            return stranger
        stranger.close()
    raise AssertionError("the agent does not measure")


def test_a_link_that_nothing_slows_is_far_above_the_default_limit(agent: str) -> None:
    """The agent is another process, as in a job; the machine may be busy."""
    speed = measured(split_endpoint(agent))
    assert min(speed.takes, speed.gives) > 10 * 1e5
    assert 0 < speed.round_trip_s < PATIENCE_S and (speed.others_take, speed.others_give) == (0, 0)


@pytest.mark.heavy
def test_a_slow_link_is_seen_in_its_direction(agent: str) -> None:
    """The rate is at most the link's, and the agent reports the rates that others have had from and to it."""
    with slow_link(agent, back=SLOW) as endpoint:
        first = measured(endpoint)
        assert first.takes <= SLOW
    with slow_link(agent, to=SLOW) as endpoint:
        second = measured(endpoint)
        assert second.gives <= SLOW
    assert (second.others_take, second.others_give) == (round(first.takes), round(first.gives))
    third = measured(split_endpoint(agent))
    assert third.others_take == round(max(first.takes, second.takes))


@pytest.mark.slow
def test_a_link_over_which_no_step_would_end_is_measured(agent: str) -> None:
    """It must not be mistaken for a node that does not answer."""
    with slow_link(agent, to=3000, back=3000) as endpoint:
        speed = measured(endpoint)
    assert 0 < speed.takes <= 3000 and 0 < speed.gives <= 3000


def test_an_agent_measures_with_one_node_at_a_time_and_answers_all_others(port: IdentityPort) -> None:
    with socket.create_connection(split_endpoint(port.endpoint), timeout=PATIENCE_S) as first:
        first.sendall(f"{MEASURE} abc\n".encode())
        assert first.recv(100) == b"elastic! node-a abc 0 0\n"
        assert measure_link(split_endpoint(port.endpoint), "node-a") is None
        assert ask(port.endpoint, "node-a", PATIENCE_S) == "itself"
    assert measured(split_endpoint(port.endpoint)).takes > 0


def test_what_stops_or_asks_for_nonsense_does_not_keep_an_agent(port: IdentityPort) -> None:
    for said in (b"< many\n", b"= 1\n", b"> 5\nab"):
        with contextlib.closing(until_it_measures(port.endpoint)) as stranger:
            stranger.sendall(said)
    assert measured(split_endpoint(port.endpoint)).takes > 0


@pytest.mark.slow
def test_another_node_a_mute_one_and_none_are_not_measured(port: IdentityPort, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent of an older version, which closes the connection, is not measured either."""
    assert measure_link(split_endpoint(port.endpoint), "node-b") is None
    port.close()
    assert measure_link(split_endpoint(port.endpoint), "node-a") is None
    monkeypatch.setattr(link_speed, "ANSWER_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert measure_link(mute.getsockname()[:2], "node-a") is None
