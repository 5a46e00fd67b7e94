"""Our loader over S3 that is 50 ms away and fails now and then, beside the same files on the local disk.

    python -m benchmarks.remote [--json] [--rows 24000] [--pace 2000]

The store is moto's, in a process of its own, behind `benchmarks.slow_network`: 50 ms, 1 % errors, 1 % of a second.
`paced_vs_local`: samples/s behind the first fifth of an epoch, for a consumer that takes `--pace` samples/s at most,
over the same from local files. `cached_vs_local`: later epochs, as fast as it goes, over later epochs of local
files with a cache as well. `free_vs_local`: the first, as fast as it goes. There the store, Python under one
lock, has the same cores and takes `store_cpu_share` of all CPU time; `free_vs_store` is over what it gives to as many
threads that fetch the same ranges and do nothing with them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pyarrow.parquet as pq

from benchmarks.peers.ours import COLUMNS, collate
from benchmarks.rows import write_rows
from elastic_train.data.ahead import REMOTE_READERS
from elastic_train.data.cache import RowCache
from elastic_train.data.loader import LaneLoader
from elastic_train.data.manifest import load_manifest
from elastic_train.data.reader import Reader
from elastic_train.data.source import open_source
from elastic_train.order import Order

BATCH, BLOCK, ROUNDS = 32, 2, 7
TROUBLE = ["--delay-s=0.05", "--refused=0.005", "--broken=0.005", "--late=0.01", "--late-s=1"]
S3_URL = "s3://rows/rows"


def main() -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.remote", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the last line only")
    parser.add_argument("--rows", type=int, default=24_000)
    parser.add_argument("--pace", type=float, default=2000.0, help="samples/s that the paced consumer takes")
    chosen = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_rows(folder / "rows", chosen.rows, rows_per_group=500)
        command = [sys.executable, "-m", "benchmarks.slow_network", *TROUBLE]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as store:
            assert store.stdin is not None and store.stdout is not None
            os.environ["AWS_ENDPOINT_URL"] = store.stdout.readline().strip()
            found = _measure(folder, chosen.pace, store.pid)
            store.stdin.close()
    if not chosen.json:
        for name, value in found.items():
            print(f"{name}: {value}")
    print(json.dumps(found))


def _measure(folder: Path, pace: float, store: int) -> dict[str, float]:
    fsspec.filesystem("s3").put(f"{folder}/rows/", f"{S3_URL}/", recursive=True)
    local, remote = str(folder / "rows"), S3_URL
    _read(local)
    paced_local, paced_remote = _read(local, pace=pace), _read(remote, pace=pace)
    free_local = _read(local)
    stores_s, own_s = _cpu_s(store), time.process_time()
    free_remote = _read(remote)
    stores_s, own_s = _cpu_s(store) - stores_s, time.process_time() - own_s
    fetched_per_s = _fetch(local, remote)
    caches = {url: folder / "cache" / name for url, name in ((local, "local"), (remote, "remote"))}
    runs = [paced_local, paced_remote, free_local, free_remote]
    cached: dict[str, list[float]] = {local: [], remote: []}
    for number in range(ROUNDS + 1):
        for url, cache in caches.items():
            runs.append(_read(url, cache=cache))
            if number:
                cached[url].append(runs[-1]["samples_per_s"])
    return {
        "paced_vs_local": round(paced_remote["samples_per_s"] / paced_local["samples_per_s"], 3),
        "cached_vs_local": round(statistics.median(cached[remote]) / statistics.median(cached[local]), 3),
        "free_vs_local": round(free_remote["samples_per_s"] / free_local["samples_per_s"], 3),
        "free_vs_store": round(free_remote["samples_per_s"] / fetched_per_s, 3),
        "store_cpu_share": round(stores_s / (stores_s + own_s), 3),
        "free_samples_per_s": round(free_remote["samples_per_s"]),
        "cpu_vs_local": round(free_remote["cpu_us"] / free_local["cpu_us"], 3),
        "lost": sum(int(run["lost"]) for run in runs),
        "repeated": sum(int(run["repeated"]) for run in runs),
    }


def _read(url: str, *, pace: float | None = None, cache: Path | None = None) -> dict[str, float]:
    """Read an epoch; samples/s and CPU time behind its first fifth."""
    manifest = load_manifest(url)
    order = Order(manifest.group_rows, num_lanes=1, seed=1, block_row_groups=BLOCK)
    reader = Reader(manifest, COLUMNS, cache=RowCache(cache, manifest, COLUMNS) if cache else None)
    num_steps = order.num_steps(BATCH)
    loader = LaneLoader(
        reader, order, collate, lanes=range(1), micro_batch=BATCH, cursor=order.cursor_at(0, BATCH), num_steps=num_steps
    )
    seen: Counter[int] = Counter()
    started_s, used_s, first = time.perf_counter(), time.process_time(), 0
    for number, (batch,) in enumerate(loader):
        if number == num_steps // 5:
            started_s, used_s, first = time.perf_counter(), time.process_time(), seen.total()
        seen.update(batch.ids.tolist())
        if pace:
            time.sleep(max(0.0, started_s + (seen.total() - first) / pace - time.perf_counter()))
    num_samples = seen.total() - first
    return {
        "samples_per_s": num_samples / (time.perf_counter() - started_s),
        "cpu_us": 1e6 * (time.process_time() - used_s) / num_samples,
        "lost": manifest.num_rows - len(seen),
        "repeated": seen.total() - len(seen),
    }


def _fetch(local: str, remote: str) -> float:
    """Fetch every row group's bytes and do nothing with them; return how many samples a second these are."""
    source, ranges, num_samples = open_source(remote), [], 0
    for path in sorted(Path(local).glob("*.parquet")):
        metadata = pq.read_metadata(path)
        num_samples += metadata.num_rows
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            chunks = [group.column(place) for place in range(group.num_columns)]
            lo = min(chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks)
            ranges.append((path.name, lo, lo + sum(chunk.total_compressed_size for chunk in chunks)))
    started_s = time.perf_counter()
    with ThreadPoolExecutor(REMOTE_READERS) as pool:
        list(pool.map(lambda place: source.open(place[0], [place[1:]]), ranges))
    return num_samples / (time.perf_counter() - started_s)


def _cpu_s(process: int) -> float:
    """Return the CPU time that a process has taken."""
    user, system = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
