"""How fast the link to another node is: it sends some bytes and takes some, for a moment, and answers a few at once.

The other end is the node's agent, at the port at which it says who it is. `elastic% NONCE` is answered as any question
is, with the best rates, in bytes a second, that others have had from the agent and to it. Then the asker says what is
next: `.` for an answer at once, `< N` for N bytes from the agent, `> N` for N bytes to it and an answer, and at the
end `= TAKES GIVES`, the rates that it has had. It takes the time to the last byte, or its answer, and the best of some
rates counts: what else two machines have to do only makes them lower. An agent measures with one node at a time, on a
thread of its own.
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
"""How long is waited for the next bytes."""
SERVE_S = 8.0
"""How long an agent measures with one node at most."""
FIRST_BYTES, MOST_BYTES, GROWTH = 1 << 11, 1 << 23, 4
"""The first are so few that a link over which nothing could be trained still brings them in time."""
SHORT_S, SHORT_TRIPS, TRIES = 0.1, 3, 3
"""What took less time, or fewer round trips, is followed by more: a moment's stall would be much of it, and a
connection begins slowly. What took longer is tried so often."""
WAY_S, ANSWERS_S = 1.0, 0.3
"""After so long neither way is tried again, nor an answer awaited once more."""
_NUM_ANSWERS = 8
_MOST_LINE = 512


class LinkSpeed(NamedTuple):
    """What was measured between here and a node: bytes a second from and to there, and seconds to there and back.

    `others_take` and `others_give` are the best rates that others have had with that node; 0 where none has.
    """

    takes: float
    gives: float
    round_trip_s: float
    others_take: float = 0.0
    others_give: float = 0.0

    def or_better(self, other: LinkSpeed) -> LinkSpeed:
        """Return the better of two measurements of one link, each way."""
        trip_s = min(self.round_trip_s, other.round_trip_s)
        ways = [max(one, two) for one, two in zip(self, other, strict=True)]
        return LinkSpeed(ways[0], ways[1], trip_s, ways[3], ways[4])


def measure_link(endpoint: tuple[str, int], node: str) -> LinkSpeed | None:
    """Measure the link to a node's agent; None if it does not measure now, or stops, or is another's."""
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
    """The other end: measures with one node at a time, and remembers the best rates that others have had."""

    def __init__(self) -> None:
        self._free = threading.Lock()
        self._takes = self._gives = 0

    def serve(self, connection: socket.socket, answer: str) -> None:
        """Take over a connection on which was asked for a measurement; `answer` says who this is."""
        if self._free.acquire(blocking=False):
            threading.Thread(target=self._measure, args=(connection, answer), name="link", daemon=True).start()
        else:
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
    """A connection on which lines and bytes come in turn.

    Bytes are moved by calls that last until all have been: between two calls a thread may have to wait for Python's
    lock, 5 ms each time, where others compute.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)  # what waits is the system's call, not Python around it
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(ANSWER_S), 0))
        self._connection, self._memory = connection, memoryview(bytearray(MOST_BYTES))

    def say(self, line: str) -> None:
        self._connection.sendall(f"{line}\n".encode())

    def line(self) -> str:
        """Return the next line; empty if there is none any more."""
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
    """Return how long the quickest of some answers takes."""
    deadline, best = time.monotonic() + ANSWERS_S, float("inf")
    for _ in range(_NUM_ANSWERS):
        best = min(best, _seconds_of(lambda: link.ask(".")))
        if time.monotonic() > deadline:
            break
    return best


def _best_rate(move: Callable[[int], None], trip_s: float) -> float:
    """Return the best rate at which more and more bytes are moved."""
    number, best, short_s, num_long = FIRST_BYTES, 0.0, max(SHORT_S, SHORT_TRIPS * trip_s), 0
    deadline = time.monotonic() + WAY_S
    while number <= MOST_BYTES and num_long < TRIES and time.monotonic() < deadline:
        seconds = _seconds_of(lambda: move(number))  # noqa: B023 - it is called at once
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
