"""S3 over a network that refuses, breaks off and delays: no row is lost, repeated, or wrong."""

from __future__ import annotations

import http.client
import pickle
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import fsspec
import pyarrow as pa
import pytest
from moto.server import ThreadedMotoServer

from elastic_train.core.order import Cursor, Order
from elastic_train.data.dataset.manifest import load_manifest
from elastic_train.data.loading.loader import LaneLoader
from elastic_train.data.loading.reader import Reader
from elastic_train.data.parquet import sources
from elastic_train.data.parquet.sources import RemoteSource, open_source
from elastic_train.errors import DataError
from tests.conftest import write_rows
from tests.elastic_train.checkpoint.faulty_network import serving

pytestmark = pytest.mark.slow

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


URL = "s3://rows/rows"
NUM_ROWS = 120


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowNetwork]:
    """A bucket with a dataset, at the other end of a network that works for now."""
    store = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    store.start()
    host, port = store.get_host_and_port()
    rows = write_rows(tmp_path_factory.mktemp("s3") / "rows", NUM_ROWS, group_rows=7)
    with (
        SlowNetwork(f"http://{host}:{port}", Trouble(0, 0, 0)).serving() as network,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("AWS_ENDPOINT_URL", network.url)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="rows")
        fsspec.filesystem("s3").put(f"{rows}/", f"{URL}/", recursive=True)
        yield network
    store.stop()


def test_every_row_arrives_once_over_a_bad_network(network: SlowNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two of five requests refused or broken off, and some far too late: each id once, with its own row."""
    monkeypatch.setattr(sources._again, "wait", lambda _: 0.0)
    monkeypatch.setattr(sources._again, "stop", lambda state: state.attempt_number >= 20)
    monkeypatch.setattr(sources, "SOONEST_HEDGE_S", 0.01)
    manifest = load_manifest(URL)
    seen: dict[int, int] = {}
    order = Order(manifest.group_rows, num_lanes=3, seed=1, block_row_groups=2)
    num_steps = order.num_steps(4)
    counted: Counter[int] = Counter()

    def collate(rows: pa.Table, ids: object) -> dict[str, object]:
        seen.update(zip(ids.tolist(), rows.column("label").to_pylist(), strict=True))  # type: ignore[attr-defined]
        return {}

    monkeypatch.setattr(network, "trouble", Trouble(0.002, refused=0.2, broken=0.2, late=0.05, late_s=0.3))
    network.counts.clear()
    loader = LaneLoader(
        Reader(manifest, ["label"]),
        order,
        collate,  # type: ignore[arg-type]
        lanes=range(3),
        micro_batch=4,
        cursor=Cursor(),
        num_steps=num_steps,
    )
    counted.update(id_ for step in loader for batch in step for id_ in batch.ids.tolist())
    assert network.counts["refused"] + network.counts["broken"] > 0
    monkeypatch.setattr(network, "trouble", Trouble(0, 0, 0))
    assert counted == Counter(range(NUM_ROWS))
    rows, ids = Reader(manifest, ["label"]).read(order.epoch(0).ids(0, 0, NUM_ROWS))
    assert [seen[id_] for id_ in ids.tolist()] == rows.column("label").to_pylist()


@pytest.mark.parametrize("pickled", [False, True])
def test_ranges_are_read_by_presigned_urls(
    network: SlowNetwork, monkeypatch: pytest.MonkeyPatch, pickled: bool
) -> None:
    """fsspec signs, and is not asked for a single range; in a process that is handed the source neither."""
    made = open_source(URL)
    source_ = pickle.loads(pickle.dumps(made)) if pickled else made
    assert isinstance(source_, RemoteSource)
    whole = fsspec.filesystem("s3").cat_file(f"{URL}/part-0.parquet")
    monkeypatch.setattr(source_._filesystem, "cat_file", None)
    assert source_.read("part-0.parquet", 4, 1000) == whole[4:1000]
    file = source_.open("part-0.parquet", [(0, 10), (20, len(whole) + 1)])
    file.seek(20)
    assert file.read(len(whole) - 20) == whole[20:]


def test_a_missing_s3_object_is_named(network: SlowNetwork, tmp_path: Path) -> None:
    """A deleted object ends reading with an error that names it, and is not retried."""
    rows = write_rows(tmp_path / "rows", 40, group_rows=7)
    fsspec.filesystem("s3").put(f"{rows}/", "s3://rows/missing/", recursive=True)
    manifest = load_manifest("s3://rows/missing")
    boto3.client("s3").delete_object(Bucket="rows", Key="missing/part-0.parquet")
    with pytest.raises(DataError, match=r"s3://rows/missing/part-0\.parquet: cannot be opened"):
        Reader(manifest, ["label"]).groups.decode(0)
