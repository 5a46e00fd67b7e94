"""Our loader over S3 that is 50 ms away and fails now and then, beside the same files on the local disk.

    python -m benchmarks.data.remote [--json] [--rows 96000] [--rows-per-group 2000] [--pace 10000]

Two stores in turn, each in a process of its own, 50 ms away, with 1 % errors and 1 % of answers a second late: `moto`,
behind `benchmarks.slow_network`, Python under one lock; and `light`, `light_store`, which takes little CPU
time. All ratios are samples/s after the first fifth over the same from local files, read in turn with them:
`paced_vs_local` for a consumer that takes `--pace` samples/s at most; `free_vs_local` as fast as it goes, where the
store takes `store_cpu_share` of all CPU time of the same cores; `apart_vs_local` with the loader on one half of the
cores, for local files as well, and the store on the other; `cached_vs_local` in later epochs, both with a cache.
`cpu_vs_local` is the loader's own CPU time for a sample, over that from local files. `fetch_…` are clients that only
fetch the same ranges from the light store.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec

from benchmarks.data.fetchers import compare
from benchmarks.data.peers.ours import COLUMNS, collate
from benchmarks.data.rows import write_rows
from elastic_train.core.order import Order
from elastic_train.data.dataset.manifest import load_manifest
from elastic_train.data.loading.loader import LaneLoader
from elastic_train.data.loading.reader import Reader
from elastic_train.data.loading.row_cache import RowCache
from rendezvous.process_table import stat_of

BATCH, BLOCK, ROUNDS, EPOCHS = 32, 2, 3, 3
TROUBLE = ["--delay-s=0.05", "--refused=0.005", "--broken=0.005", "--late=0.01", "--late-s=1"]
S3_URL = "s3://rows/rows"
Run = dict[str, float]


def main() -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data.remote", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the last line only")
    parser.add_argument("--rows", type=int, default=96_000)
    parser.add_argument("--rows-per-group", type=int, default=2000)
    parser.add_argument("--pace", type=float, default=10_000.0, help="samples/s that the paced consumer takes")
    chosen = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_rows(folder / "rows", chosen.rows, rows_per_group=chosen.rows_per_group)
        local = str(folder / "rows")
        runs = [_read(local)]
        with _serving("benchmarks.slow_network") as store:
            fsspec.filesystem("s3").put(f"{local}/", f"{S3_URL}/", recursive=True)
            found |= {f"moto_{name}": value for name, value in _measure(local, store, chosen.pace, runs).items()}
            found["cached_vs_local"] = _with_caches(local, folder / "cache", runs)
        with _serving("benchmarks.data.light_store", temporary) as store:
            found |= {f"light_{name}": value for name, value in _measure(local, store, chosen.pace, runs).items()}
            found |= compare(folder / "rows", S3_URL, EPOCHS)
    found |= {name: sum(int(run[name]) for run in runs) for name in ("lost", "repeated")}
    if not chosen.json:
        for name, value in found.items():
            print(f"{name}: {value}")
    print(json.dumps(found))


@contextmanager
def _serving(program: str, *arguments: str) -> Iterator[int]:
    """Run a store, and make all clients created from now on use it."""
    command = [sys.executable, "-m", program, *arguments, *TROUBLE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as store:
        assert store.stdin is not None and store.stdout is not None
        url = store.stdout.readline().strip()
        if not url:  # otherwise, clients would contact AWS itself
            raise SystemExit(f"{program} did not start; `{shlex.join(command)}` says why")
        os.environ["AWS_ENDPOINT_URL"] = url
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        yield store.pid
        store.stdin.close()


def _measure(local: str, store: int, pace: float, runs: list[Run]) -> Run:
    """Read at full speed on all cores and on some, and paced; append the results to `runs`."""
    cores = sorted(os.sched_getaffinity(0))
    half = cores[: max(1, len(cores) // 2)]
    shared, own_s, store_s = _in_turn(local, store)
    try:
        _pin(os.getpid(), half)
        _pin(store, cores[len(half) :] or cores)
        apart, _, _ = _in_turn(local, store)
    finally:
        _pin(os.getpid(), cores)
        _pin(store, cores)
    paced = {url: [_read(url, pace=pace, num_epochs=1)] for url in (local, S3_URL)}
    runs += [run for pair in (shared, apart, paced) for found in pair.values() for run in found]
    return {
        "paced_vs_local": _ratio(paced, local),
        "free_vs_local": _ratio(shared, local),
        "apart_vs_local": _ratio(apart, local),
        "free_samples_per_s": round(statistics.median(run["samples_per_s"] for run in shared[S3_URL])),
        "cpu_vs_local": _ratio(shared, local, "cpu_us"),
        "store_cpu_share": round(store_s / (store_s + own_s), 3),
    }


def _in_turn(local: str, store: int) -> tuple[dict[str, list[Run]], float, float]:
    """Read local files and the store's in turn; return the runs, and our and the store's CPU time for the store's."""
    found: dict[str, list[Run]] = {local: [], S3_URL: []}
    own_s = store_s = 0.0
    for _ in range(ROUNDS):
        found[local].append(_read(local))
        own_s, store_s = own_s - time.process_time(), store_s - _cpu_s(store)
        found[S3_URL].append(_read(S3_URL))
        own_s, store_s = own_s + time.process_time(), store_s + _cpu_s(store)
    return found, own_s, store_s


def _with_caches(local: str, folder: Path, runs: list[Run]) -> float:
    """Read repeatedly through a cache of decoded row groups; the first pass fills the cache."""
    found: dict[str, list[Run]] = {local: [], S3_URL: []}
    for number in range(ROUNDS + 1):
        for place, url in enumerate(found):
            runs.append(_read(url, cache=folder / str(place)))
            if number:
                found[url].append(runs[-1])
    return _ratio(found, local)


def _ratio(found: dict[str, list[Run]], local: str, name: str = "samples_per_s") -> float:
    ours, theirs = (statistics.median(run[name] for run in found[url]) for url in (S3_URL, local))
    return round(ours / theirs, 3)


def _read(url: str, *, num_epochs: int = EPOCHS, pace: float | None = None, cache: Path | None = None) -> Run:
    """Read some epochs; return samples/s and CPU time after the first fifth, and if each id came once per epoch."""
    manifest = load_manifest(url)
    order = Order(manifest.group_rows, num_lanes=1, seed=1, block_row_groups=BLOCK)
    reader = Reader(manifest, COLUMNS, cache=RowCache(cache, manifest, COLUMNS) if cache else None)
    num_steps = num_epochs * order.num_steps(BATCH)
    loader = LaneLoader(
        reader, order, collate, lanes=range(1), micro_batch=BATCH, cursor=order.cursor_at(0, BATCH), num_steps=num_steps
    )
    seen: list[list[int]] = []
    started_s, used_s, first, num_seen = time.perf_counter(), time.process_time(), 0, 0
    for number, (batch,) in enumerate(loader):
        if number == num_steps // 5:
            started_s, used_s, first = time.perf_counter(), time.process_time(), num_seen
        seen.append(batch.ids.tolist())
        num_seen += len(batch.ids)
        if pace:
            time.sleep(max(0.0, started_s + (num_seen - first) / pace - time.perf_counter()))
    took_s, used_s = time.perf_counter() - started_s, time.process_time() - used_s
    times = Counter(id_ for ids in seen for id_ in ids)
    return {
        "samples_per_s": (num_seen - first) / took_s,
        "cpu_us": 1e6 * used_s / (num_seen - first),
        "lost": sum(max(0, num_epochs - times[id_]) for id_ in range(manifest.num_rows)),
        "repeated": sum(max(0, count - num_epochs) for count in times.values()),
    }


def _pin(process: int, cores: Sequence[int]) -> None:
    """Pin all threads of a process, and those they start, to some cores."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        with suppress(ProcessLookupError):  # a thread that has ended
            os.sched_setaffinity(int(thread.name), cores)


def _cpu_s(process: int) -> float:
    """Return the CPU time of a process."""
    stat = stat_of(process)
    assert stat is not None, "it runs"
    return stat.cpu_ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
