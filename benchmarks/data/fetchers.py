"""S3 clients that fetch the same ranges and discard them: fsspec, Arrow's, and the source that we use."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from elastic_train.data.loading.read_ahead import REMOTE_READERS
from elastic_train.data.parquet.sources import open_source

ROUNDS = 3
Place = tuple[str, int, int]
Fetch = Callable[[Place], object]


def compare(rows: Path, url: str, num_passes: int) -> dict[str, dict[str, float]]:
    """Fetch every row group's bytes with each client in turn; return medians of MB/s and of CPU ms per MB."""
    places = _places(rows)
    num_mb = num_passes * sum(hi - lo for _, lo, hi in places) / 1e6
    clients = {"fsspec": _fsspec(url), "arrow": _arrow(rows, url), "ours": _ours(url)}
    speeds: dict[str, list[float]] = {name: [] for name in clients}
    costs: dict[str, list[float]] = {name: [] for name in clients}
    with ThreadPoolExecutor(REMOTE_READERS) as pool:
        for number in range(ROUNDS + 1):
            for name, fetch in clients.items():
                started_s, used_s = time.perf_counter(), time.process_time()
                list(pool.map(fetch, num_passes * places))
                if number:
                    speeds[name].append(num_mb / (time.perf_counter() - started_s))
                    costs[name].append(1e3 * (time.process_time() - used_s) / num_mb)
    return {
        "fetch_mb_per_s": {name: round(statistics.median(found)) for name, found in speeds.items()},
        "fetch_cpu_ms_per_mb": {name: round(statistics.median(found), 2) for name, found in costs.items()},
    }


def _ours(url: str) -> Fetch:
    source = open_source(url)
    return lambda place: source.open(place[0], [place[1:]])


def _fsspec(url: str) -> Fetch:
    filesystem = fsspec.filesystem("s3")

    def fetch(place: Place) -> None:
        for _ in range(3):
            try:
                filesystem.cat_file(f"{url}/{place[0]}", start=place[1], end=place[2])
            except OSError:
                continue
            return

    return fetch


def _arrow(rows: Path, url: str) -> Fetch:
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    filesystem = pyarrow.fs.S3FileSystem(endpoint_override=endpoint, region=os.environ["AWS_DEFAULT_REGION"])
    pa.set_io_thread_count(REMOTE_READERS)
    root = url.removeprefix("s3://")
    files = {path.name: _again(filesystem.open_input_file, f"{root}/{path.name}") for path in rows.glob("*.parquet")}
    return lambda place: _again(files[place[0]].read_at, place[2] - place[1], place[1])


def _again(call: Callable[..., pa.NativeFile], *arguments: object) -> pa.NativeFile:
    for _ in range(2):
        try:
            return call(*arguments)
        except OSError:
            continue
    return call(*arguments)


def _places(rows: Path) -> list[Place]:
    places = []
    for path in sorted(rows.glob("*.parquet")):
        metadata = pq.read_metadata(path)
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            chunks = [group.column(place) for place in range(group.num_columns)]
            lo = min(chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks)
            places.append((path.name, lo, lo + sum(chunk.total_compressed_size for chunk in chunks)))
    return places
