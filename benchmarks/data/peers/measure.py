"""Run one measurement of one loader in its own process.

    python -m benchmarks.data.peers.measure PEER WHAT ROWS OUT ...

The last line is JSON. `prepare` converts the rows. `speed SECONDS` reads for that time, epoch after epoch. `half STATE`
reads half an epoch and stores the state there; `resume STATE` opens from it and reads one batch.
"""

from __future__ import annotations

import importlib
import json
import pickle
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from benchmarks.data.peers.peer import BATCH, Batch, Peer, World, files_of


def main(name: str, what: str, rows: Path, out: Path, *rest: str) -> None:
    """Measure, and print the results."""
    torch.set_num_threads(1)
    peer: Peer = importlib.import_module(f"benchmarks.data.peers.{name}").PEER
    found: dict[str, Any]
    if what == "prepare":
        out.mkdir(parents=True, exist_ok=True)
        started_s = time.perf_counter()
        peer.prepare(rows, out)
        found = {"prepare_s": time.perf_counter() - started_s}
    elif what == "speed":
        found = speed(peer, rows, out, float(rest[0]))
    elif what == "half":
        found = half(peer, rows, out, Path(rest[0]))
    elif what == "resume":
        found = resume(peer, rows, out, Path(rest[0]))
    else:
        raise SystemExit(f"no measurement '{what}'")
    print(json.dumps(found), flush=True)


def speed(peer: Peer, rows: Path, out: Path, seconds: float) -> dict[str, float]:
    """Read epoch after epoch for `seconds` after the first batch.

    The clocks stop while a dataset is reopened, which users do not do between epochs. Work that a loader defers to its
    first batch, such as an epoch's order, counts.
    """
    before_mb, started_s = _peak_mb(), time.perf_counter()
    batches = iter(peer.open(rows, out, World(), None))
    next(batches)
    since_s, since_cpu_s, num_rows = time.perf_counter(), _cpu_s(), 0
    first_batch_s = since_s - started_s
    while time.perf_counter() - since_s < seconds:
        for tokens, _ in batches:
            num_rows += len(tokens)
            if time.perf_counter() - since_s >= seconds:
                break
        else:
            ended_s, ended_cpu_s = time.perf_counter(), _cpu_s()
            stream = peer.open(rows, out, World(), None)
            since_s, since_cpu_s = since_s + time.perf_counter() - ended_s, since_cpu_s + _cpu_s() - ended_cpu_s
            batches = iter(stream)
    return {
        "samples_per_s": num_rows / (time.perf_counter() - since_s),
        "cpu_us_per_sample": 1e6 * (_cpu_s() - since_cpu_s) / num_rows,
        "first_batch_s": first_batch_s,
        "memory_mb": _peak_mb() - before_mb,
    }


def half(peer: Peer, rows: Path, out: Path, kept: Path) -> dict[str, float]:
    """Read half an epoch, and store the state."""
    wanted = sum(pq.read_metadata(path).num_rows for path in files_of(rows)) // 2
    stream = peer.open(rows, out, World(), None)
    started_s = time.perf_counter()
    num_rows = sum(len(tokens) for tokens, _ in _first(iter(stream), wanted // BATCH))
    kept.write_bytes(pickle.dumps(stream.state()))
    return {"half_s": time.perf_counter() - started_s, "rows": num_rows, "state_bytes": kept.stat().st_size}


def _first(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    for _ in range(count):
        yield next(batches)


def resume(peer: Peer, rows: Path, out: Path, kept: Path) -> dict[str, float]:
    """Open from a state, and read one batch."""
    state = pickle.loads(kept.read_bytes())
    before_mb, started_s = _peak_mb(), time.perf_counter()
    next(iter(peer.open(rows, out, World(), state)))
    return {"resume_s": time.perf_counter() - started_s, "resume_mb": _peak_mb() - before_mb}


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), *sys.argv[5:])
    sys.stdout.flush()
    import os

    os._exit(0)  # some loaders' threads never end
