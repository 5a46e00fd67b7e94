"""Measure the link to another node: rates in both directions and the round trip.

The other end is the node's agent, at its identity port. It answers `elastic% NONCE` like a question for its identity,
plus the best rates, in bytes per second, that others have had from and to it. Then the client sends commands: `.` for
an immediate answer, `< N` for N bytes from the agent, `> N` for N bytes to it and an answer, and finally `= TAKES
GIVES`, the rates it measured. Time is measured up to the last byte or the answer, and the best of several rates counts,
because other load can only lower them. An agent measures with one node at a time, on its own thread.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

MEASURE = "elastic%"
ANSWER_S = 2.0
"""Seconds to wait for the next bytes."""
SERVE_S = 8.0
"""Maximum seconds that an agent measures with one node."""
FIRST_BYTES, MOST_BYTES, GROWTH = 1 << 11, 1 << 23, 4
"""Sizes start so small that even a link too slow for training delivers the first ones in time."""
SHORT_S, SHORT_TRIPS, TRIES = 0.1, 3, 3
"""Transfers shorter than this, or than this many round trips, are followed by larger ones, because a short stall would
dominate them and connections start slowly; longer ones are repeated this often.
"""
WAY_S, ANSWERS_S = 1.0, 0.3
"""Seconds after which a direction, or the round trip, is not tried again."""
_NUM_ANSWERS = 8
_MOST_LINE = 512


class LinkSpeed(NamedTuple):
    """A measured link: bytes per second from and to the node, and the round trip in seconds.

    `others_take` and `others_give` are the best rates that others have had with that node; 0 if none.
    """

    takes: float
    gives: float
    round_trip_s: float
    others_take: float = 0.0
    others_give: float = 0.0

    def or_better(self, other: LinkSpeed) -> LinkSpeed:
        """Return the better of two measurements of one link, per direction."""
        trip_s = min(self.round_trip_s, other.round_trip_s)
        ways = [max(one, two) for one, two in zip(self, other, strict=True)]
        return LinkSpeed(ways[0], ways[1], trip_s, ways[3], ways[4])


def measure_link(endpoint: tuple[str, int], node: str) -> LinkSpeed | None:
    """Measure the link to a node's agent; None if it is busy, stops, or belongs to another node."""
    nonce = secrets.token_hex(8)
    try:
        with socket.create_connection(endpoint, timeout=ANSWER_S) as connection:
            link = _Link(connection)
            link.say(f"{MEASURE} {nonce}")
            _, name, told, takes, gives = link.line().split()
            if (name, told) != (node, nonce):
                return None
            others = float(takes), float(gives)
            trip_s = _round_trip_s(link)
            rates = _best_rate(link.take, trip_s), _best_rate(link.give, trip_s)
            link.say("= {:.0f} {:.0f}".format(*rates))
            return LinkSpeed(*rates, trip_s, *others)
    except (OSError, ValueError):
        return None


class LinkServer:
    """The serving end: measures with one node at a time, and remembers the best rates of others."""

    def __init__(self) -> None:
        self._free = threading.Lock()
        self._takes = self._gives = 0

    def serve(self, connection: socket.socket, answer: str) -> None:
        """Take over a connection that asked for a measurement; `answer` identifies this node."""
        if not self._free.acquire(blocking=False):
            connection.close()
            return
        try:
            threading.Thread(target=self._measure, args=(connection, answer), name="link", daemon=True).start()
        except RuntimeError:  # no thread can be started now
            self._free.release()
            connection.close()

    def _measure(self, connection: socket.socket, answer: str) -> None:
        try:
            with contextlib.suppress(OSError, ValueError), connection:
                link, deadline = _Link(connection), time.monotonic() + SERVE_S
                link.say(f"{answer} {self._takes} {self._gives}")
                while time.monotonic() < deadline and (line := link.line()):
                    self._act(link, *line.split())
        finally:
            self._free.release()

    def _act(self, link: _Link, what: str, *numbers: str) -> None:
        if what == "=":
            takes, gives = map(int, numbers)
            self._takes, self._gives = max(self._takes, takes), max(self._gives, gives)
        elif what == "<":
            link.send(int(numbers[0]))
        elif what == ">":
            link.receive(int(numbers[0]))
            link.say(".")
        else:
            link.say(".")


class _Link:
    """A connection that carries lines and bytes alternately.

    Bytes are moved by blocking system calls: between calls a thread may wait for Python's lock, 5 ms each time, while
    others compute.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)  # the system call waits, not Python
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(ANSWER_S), 0))
        self._connection, self._memory = connection, memoryview(bytearray(MOST_BYTES))

    def say(self, line: str) -> None:
        self._connection.sendall(f"{line}\n".encode())

    def line(self) -> str:
        """Return the next line; empty at the end of the connection."""
        line = b""
        while not line.endswith(b"\n") and len(line) < _MOST_LINE and (read := self._connection.recv(1)):
            line += read
        return line.decode().strip()

    def ask(self, line: str) -> None:
        self.say(line)
        self._answer()

    def send(self, number: int) -> None:
        number = min(number, MOST_BYTES)
        while number > 0:
            number -= self._connection.send(self._memory[:number])

    def receive(self, number: int) -> None:
        number = min(number, MOST_BYTES)
        while number > 0:
            if not (read := self._connection.recv_into(self._memory, number, socket.MSG_WAITALL)):
                raise ConnectionError("the other end has ended")
            number -= read

    def take(self, number: int) -> None:
        self.say(f"< {number}")
        self.receive(number)

    def give(self, number: int) -> None:
        self.say(f"> {number}")
        self.send(number)
        self._answer()

    def _answer(self) -> None:
        if not self.line():
            raise ConnectionError("the other end has ended")


def _round_trip_s(link: _Link) -> float:
    """Return the shortest of several round trips, in seconds."""
    deadline, best = time.monotonic() + ANSWERS_S, float("inf")
    for _ in range(_NUM_ANSWERS):
        best = min(best, _seconds_of(lambda: link.ask(".")))
        if time.monotonic() > deadline:
            break
    return best


def _best_rate(move: Callable[[int], None], trip_s: float) -> float:
    """Return the best rate while moving more and more bytes."""
    number, best, short_s, num_long = FIRST_BYTES, 0.0, max(SHORT_S, SHORT_TRIPS * trip_s), 0
    deadline = time.monotonic() + WAY_S
    while number <= MOST_BYTES and num_long < TRIES and time.monotonic() < deadline:
        seconds = _seconds_of(lambda: move(number))  # noqa: B023 - called at once
        best = max(best, number / seconds)
        if seconds > short_s:
            num_long += 1
        else:
            number *= GROWTH
    return best


def _seconds_of(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return max(time.perf_counter() - began, 1e-9)
