"""Asking which agent listens at an address: this node's, another one, or none."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from rendezvous.agent import identity
from rendezvous.agent.identity import IdentityPort, ask, refuses
from tests.conftest import PATIENCE_S


@pytest.fixture
def port() -> Iterator[IdentityPort]:
    port = IdentityPort("127.0.0.1", "node-a")
    yield port
    port.close()


def test_an_agent_says_which_node_it_is(port: IdentityPort) -> None:
    """Any number of times, to every caller; asked for another node, it says that it is not that one."""
    assert [ask(port.endpoint, "node-a", PATIENCE_S) for _ in range(3)] == ["itself"] * 3
    assert ask(port.endpoint, "node-b", PATIENCE_S) == "other"


def test_an_agent_that_has_ended_refuses(port: IdentityPort) -> None:
    """A machine without an agent at that address refuses as well."""
    port.close()
    assert ask(port.endpoint, "node-a", PATIENCE_S) == "refused"


def test_an_agent_answers_again_after_a_moment_without_free_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers would take it for frozen for ever."""
    monkeypatch.setattr(identity, "PAUSE_S", 0.0)
    left, accept = [OSError(errno.EMFILE, "too many open files")] * 3, socket.socket.accept

    def failing(listener: socket.socket) -> tuple[socket.socket, object]:
        if left:
            raise left.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    port = IdentityPort("127.0.0.1", "n1")
    try:
        assert ask(port.endpoint, "n1", PATIENCE_S) == "itself" and not left
    finally:
        port.close()


def test_a_quick_look_tells_a_refusal_from_all_else(port: IdentityPort) -> None:
    """It asks nothing, and does not keep the agent from answering others."""
    assert not refuses(port.endpoint, PATIENCE_S) and not refuses("nowhere", 1.0)
    assert ask(port.endpoint, "node-a", PATIENCE_S) == "itself"
    port.close()
    assert refuses(port.endpoint, PATIENCE_S)


def test_what_is_no_address_is_silent() -> None:
    """Nothing can be reached at it."""
    assert ask("nowhere", "node-a") == ask("nowhere.invalid:1", "node-a") == "silent"


def test_a_stranger_does_not_keep_an_agent_from_answering(port: IdentityPort) -> None:
    """A scanner that connects and sends nothing, or garbage, is soon disconnected."""
    host, _, number = port.endpoint.partition(":")
    with socket.create_connection((host, int(number))) as scanner:
        scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert ask(port.endpoint, "node-a", PATIENCE_S) == "itself"
    with socket.create_connection((host, int(number))):
        assert ask(port.endpoint, "node-a", PATIENCE_S) == "itself"


@pytest.mark.parametrize(("said", "answer"), [(b"", "mute"), (b"elastic! node-a 0123\n", "other"), (b"SSH-2", "other")])
def test_other_programs_are_not_taken_for_an_agent(said: bytes, answer: str) -> None:
    """A program that closes without an answer counts as silent; a recorded answer has another nonce."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asking = _beside(lambda: ask(f"127.0.0.1:{listener.getsockname()[1]}", "node-a", PATIENCE_S))
        connection, _ = listener.accept()
        with connection:
            connection.recv(100)
            connection.sendall(said)
        assert asking.result(PATIENCE_S) == answer


def _beside(call: object) -> object:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(1).submit(call)  # type: ignore[arg-type]


def test_an_agent_that_is_frozen_is_mute() -> None:
    """The kernel still accepts the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert ask(f"127.0.0.1:{listener.getsockname()[1]}", "node-a", 0.1) == "mute"
