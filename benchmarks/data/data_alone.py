"""Figures of our loader alone, for `benchmarks.data`: at 42 million rows, and compared with pyarrow on the same files.

`scale ROWS`: building the order, seeking, memory. `decode ROWS`: the time of decoding row groups with one thread per
core over that of pyarrow with the same threads, in turn; and the loader's CPU time over decoding.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from elastic_train.core.order import Cursor, Order
from elastic_train.data.dataset.manifest import load_manifest
from elastic_train.data.loading.loader import LaneLoader
from elastic_train.data.loading.reader import Reader
from elastic_train.data.parquet.footer_index import load_footers

COLUMNS = ["input_ids", "label"]
NUM_LANES, ROUNDS = 64, 7


def main(what: str, rows: str) -> None:
    print(json.dumps(scale(rows) if what == "scale" else decode(rows)))


def scale(rows: str) -> dict[str, float]:
    """Load a dataset of full size, and seek all over it in various lanes."""
    before = _resident_mb()
    manifest, footers = load_manifest(rows), load_footers(rows)
    builds, seeks = [], []
    for seed in range(3 * ROUNDS):
        started_s = time.perf_counter()
        order = Order(manifest.group_rows, num_lanes=NUM_LANES, seed=seed)
        order.epoch(0)
        builds.append(time.perf_counter() - started_s)
    chance = random.Random(0)
    for lane in range(NUM_LANES):
        lo = chance.randrange(manifest.num_rows // NUM_LANES)
        started_s = time.perf_counter()
        assert len(order.epoch(0).ids(lane, lo, lo + 32)) > 0
        seeks.append(time.perf_counter() - started_s)
    assert footers is not None and len(footers) == len(manifest.files)
    return {
        "order_build_ms": round(1e3 * min(builds), 3),
        "seek_ms": round(1e3 * statistics.median(seeks), 3),
        "order_and_manifest_mb": round(_resident_mb() - before, 1),
    }


def decode(rows: str) -> dict[str, float]:
    """Decode all row groups with our reader and with pyarrow alone, in turn."""
    manifest, num_threads = load_manifest(rows), len(os.sched_getaffinity(0))
    reader = Reader(manifest, COLUMNS)
    paths = [f"{rows}/{file.path}" for file in manifest.files]
    places = [
        (path, group) for path, file in zip(paths, manifest.files, strict=True) for group in range(len(file.row_groups))
    ]
    metadata = {path: pq.read_metadata(path) for path in paths}

    def theirs(place: tuple[str, int]) -> int:
        path, group = place
        file = pq.ParquetFile(path, metadata=metadata[path], pre_buffer=False)
        return len(file.read_row_group(group, columns=COLUMNS, use_threads=False))

    with ThreadPoolExecutor(num_threads) as pool:
        sides: list[Callable[[], object]] = [
            lambda: list(pool.map(lambda group: reader.decode(group).nbytes, range(len(places)))),
            lambda: list(pool.map(theirs, places)),
            lambda: _load(reader, manifest.group_rows),
        ]
        wall: list[list[float]] = [[], [], []]
        cpu: list[list[float]] = [[], [], []]
        for number in range(ROUNDS + 1):
            for place, side in enumerate(sides):
                started_s, used_s = time.perf_counter(), time.process_time()
                side()
                if number:
                    wall[place].append(time.perf_counter() - started_s)
                    cpu[place].append(time.process_time() - used_s)
    ours_s, theirs_s, loader_s = (statistics.median(times) for times in wall)
    return {
        "decode_vs_pyarrow": round(theirs_s / ours_s, 3),
        "decode_rows_per_s": round(manifest.num_rows / ours_s),
        "loader_vs_decode": round(ours_s / loader_s, 3),
        "loader_cpu_over_decode": round(statistics.median(cpu[2]) / statistics.median(cpu[0]), 3),
    }


def _load(reader: Reader, group_rows: npt.NDArray[np.int64]) -> int:
    """Read an epoch through the loader without making tensors."""
    order = Order(group_rows, num_lanes=1, seed=1)
    loader = LaneLoader(
        reader, order, _nothing, lanes=range(1), micro_batch=32, cursor=Cursor(), num_steps=order.num_steps(32)
    )
    return sum(len(batch.ids) for step in loader for batch in step)


def _nothing(rows: pa.Table, ids: npt.NDArray[np.int64]) -> dict[str, Tensor]:
    return {}


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main(*sys.argv[1:])
