"""TCP proxies between nodes and etcd, which can hold back or delay either direction.

A network that loses packets loses no bytes of a connection: they arrive once it heals. Data that is held back is
therefore delivered later, unless the connection was closed meanwhile. Connections are always accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from dataclasses import dataclass, field

_CHUNK = 1 << 16
_LOOK_EVERY_S = 0.02


@dataclass
class Way:
    """The state of a node's connections to etcd, in both directions; may be set from any thread."""

    requests_are_held: bool = False
    answers_are_held: bool = False
    delay_s: float = 0.0
    num_faults: int = 0
    """Number of changes; an undo checks it to see if another change came in between."""
    num_held: int = 0
    """Number of chunks, in both directions, that were held or delayed."""


@dataclass
class Proxies:
    """Listens on one port per (node, target) and forwards everything, subject to the node's `Way`."""

    host: str
    targets: list[str]
    """Targets as host:port."""
    ways: list[Way]
    """One per node."""
    ports: list[list[int]] = field(default_factory=list)
    """For each node, one port per target."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen, and serve on a thread until `close`."""
        for way in self.ways:
            self.ports.append([self._listen(way, target) for target in self.targets])
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end)
        if self._thread is not None:
            self._thread.join(5.0)

    def _end(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)

    def endpoint(self, node: int, host: str) -> str:
        """Return a node's etcd endpoints, comma-separated, with the host name `host`."""
        return ",".join(f"{host}:{port}" for port in self.ports[node])

    def _listen(self, way: Way, target: str) -> int:
        listening = socket.create_server((self.host, 0))

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _connect(reader, writer, way, target)

        self._loop.run_until_complete(asyncio.start_server(serve, sock=listening))
        return int(listening.getsockname()[1])


async def _connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way, target: str) -> None:
    host, _, port = target.rpartition(":")
    with contextlib.suppress(OSError, asyncio.CancelledError):
        try:
            theirs, ours = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()  # pass on the refusal
            return
        pumps = [
            asyncio.ensure_future(_pump(reader, ours, way, "requests_are_held")),
            asyncio.ensure_future(_pump(theirs, writer, way, "answers_are_held")),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        for end in (writer, ours):
            end.transport.abort()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: Way, held: str) -> None:
    while content := await source.read(_CHUNK):
        way.num_held += bool(way.delay_s) or getattr(way, held)
        if way.delay_s:
            await asyncio.sleep(way.delay_s)
        while getattr(way, held):
            await asyncio.sleep(_LOOK_EVERY_S)
        sink.write(content)
        await sink.drain()
