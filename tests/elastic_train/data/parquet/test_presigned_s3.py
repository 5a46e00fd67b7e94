"""Ranges by signed addresses: what came whole, from the place that was asked for, or nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from elastic_train.data.parquet import sources
from elastic_train.data.parquet.sources import SignedRanges
from tests.conftest import PATIENCE_S

CONTENT = bytes(range(256)) * 1024


class Server(ThreadingHTTPServer):
    """Serves one object in the way that `fault` says."""

    daemon_threads = True
    fault = ""
    num_connections = num_signed = 0
    ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def sign(self, path: str, expiration: int) -> str:
        """Sign an address, as a file system does."""
        self.num_signed += 1
        if self.fault == "not signed":
            raise NotImplementedError
        return f"{self.url}/{path}?signature={self.num_signed}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that go away."""


class Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.num_connections += 1

    def finish(self) -> None:
        super().finish()
        self.connection.close()
        self.server.ended.set()

    def do_GET(self) -> None:
        fault = self.server.fault
        lo, hi = map(int, self.headers["range"].removeprefix("bytes=").split("-"))
        content = CONTENT[lo : hi + 1]
        self.send_response({"whole": 200, "refused": 503}.get(fault, 206))
        if fault == "no length":
            self.close_connection = True
        else:
            self.send_header("content-length", str(len(content)))
        self.send_header("content-range", f"bytes {lo + (fault == 'elsewhere')}-{hi}/{len(CONTENT)}")
        self.end_headers()
        self.wfile.write(content[:100] if fault == "short" else content)
        self.close_connection |= fault in ("short", "closed after it")

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    """A server at work."""
    with Server(("127.0.0.1", 0), Request) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ranges_of(server: Server) -> SignedRanges:
    """Return ranges whose addresses the server signs."""
    ranges = SignedRanges(None)
    ranges.__dict__["_signer"] = server
    return ranges


def test_ranges_of_an_object_share_one_signature_and_one_connection(server: Server) -> None:
    """Any range has the object's bytes, fewer at its end; one signature, one connection for a thread."""
    ranges = ranges_of(server)
    for lo, hi in ((0, 1), (5, 200_000), (len(CONTENT) - 10, len(CONTENT)), (len(CONTENT) - 10, len(CONTENT) + 1)):
        assert ranges.read("a", lo, hi) == CONTENT[lo:hi]
    assert (server.num_signed, server.num_connections) == (1, 1)


def test_a_connection_closed_while_idle_is_reopened(server: Server) -> None:
    """Servers close what is idle; the next range goes over a new connection."""
    ranges, server.fault = ranges_of(server), "closed after it"
    for number in (1, 2):
        server.ended = threading.Event()
        assert ranges.read("a", 0, 10) == CONTENT[:10]
        assert server.ended.wait(PATIENCE_S)
        assert (server.num_signed, server.num_connections) == (1, number)


@pytest.mark.parametrize("fault", ["refused", "short", "whole", "elsewhere", "no length", "not signed"])
def test_a_wrong_answer_gives_no_bytes(server: Server, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No failure gives bytes; the next read signs again and works. After too many in a row there is a pause."""
    monkeypatch.setattr(sources, "MOST_FAILURES", 3)
    ranges, server.fault = ranges_of(server), fault
    assert ranges.read("a", 0, 5000) is None
    assert ranges.read("a", 0, 5000) is None
    server.fault = ""
    assert ranges.read("a", 0, 5000) == CONTENT[:5000]
    assert server.num_signed == 3
    server.fault = fault
    for _ in range(5):
        assert ranges.read("b", 0, 5000) is None
    assert server.num_signed == 6
    server.fault = ""
    assert ranges.read("a", 0, 5000) is None
    ranges._idle_until_s -= sources.SIGN_AGAIN_AFTER_S
    assert ranges.read("a", 0, 5000) == CONTENT[:5000]


def test_fsspec_reads_where_a_proxy_is_set(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that is configured for such URLs is not bypassed."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    assert ranges_of(server).read("a", 0, 10) is None
    assert server.num_connections == 0
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert ranges_of(server).read("a", 0, 10) == CONTENT[:10]


@pytest.mark.heavy
def test_addresses_have_signatures_of_version_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """In us-east-1, too, where boto signs by version 2 of itself; a version that is chosen stays."""
    import fsspec

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    options: dict[str, Any] = {"endpoint_url": "http://127.0.0.1:9", "client_kwargs": {"region_name": "us-east-1"}}
    for config, mark in (({}, "X-Amz-Signature="), ({"signature_version": "s3"}, "&Signature=")):
        filesystem = fsspec.filesystem("s3", **options, config_kwargs=config)
        address = SignedRanges(filesystem)._address("rows/a b")
        assert (address.netloc, address.path) == ("127.0.0.1:9", "/rows/a%20b")
        assert mark in f"?&{address.query}"
    assert SignedRanges(fsspec.filesystem("s3", anon=True, **options))._address("rows/a").query == ""
