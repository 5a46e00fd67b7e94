"""An HTTP server that seems far away: all answers delayed, some requests refused or cut off, a few answered very late.

Faults are random with a seed, and counted in `counts`.
"""

from __future__ import annotations

import http.client
import random
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.elastic_train.checkpoint.faulty_network import serving

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


@dataclass(frozen=True, slots=True)
class Trouble:
    """The delay of an answer, and the shares of requests that are refused, cut off, or late."""

    delay_s: float = 0.05
    refused: float = 0.005
    broken: float = 0.005
    late: float = 0.0
    late_s: float = 1.0

    def draw(self, chance: random.Random) -> str:
        """Return the fault of a request."""
        lot = chance.random()
        for what in ("refused", "broken", "late"):
            lot -= getattr(self, what)
            if lot < 0:
                return what
        return "answered"


class SlowNetwork(ThreadingHTTPServer):
    """Forwards requests to a server with a delay."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, server: str, trouble: Trouble, seed: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.target, self.trouble = urlsplit(server).netloc, trouble
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.counts: Counter[str] = Counter()
        self._chance = random.Random(seed)

    def serving(self) -> AbstractContextManager[SlowNetwork]:
        """Serve until the context ends."""
        return serving(self)

    def draw(self) -> str:
        """Draw and count the fault of a request."""
        what = self.trouble.draw(self._chance)
        self.counts[what] += 1
        return what

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SlowNetwork

    def setup(self) -> None:
        super().setup()
        self._upstream = http.client.HTTPConnection(self.server.target)

    def finish(self) -> None:
        self._upstream.close()
        super().finish()

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        what, trouble = self.server.draw() if self.command == "GET" else "answered", self.server.trouble
        time.sleep(trouble.delay_s + (trouble.late_s if what == "late" else 0))
        if what == "refused":
            self.send_response(503)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        self._upstream.request(self.command, self.path, body, dict(self.headers))
        answer = self._upstream.getresponse()
        content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        is_head = self.command == "HEAD"
        self.send_header("content-length", answer.getheader("content-length", "0") if is_head else str(len(content)))
        self.end_headers()
        if what == "broken":
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        else:
            self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""
