"""Count a loader's repeats and skips when the number of ranks changes in an epoch: `... resize PEER ROWS OUT STAGES`.

STAGES is a JSON list [[ranks, steps], ...]; the last stage runs to the epoch's end. Every rank of a stage is opened
from the state of rank 0 of the previous stage, as libraries say to save it. Row i holds the one token i + 1. The last
line is JSON: `repeats`, `skips`, or `cannot` with the library's own message.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.data.peers.peer import Peer, World, files_of

BATCH = 8
OUR_LANES, OUR_MICRO_BATCH = 16, 2


def main(name: str, rows: Path, out: Path, stages: list[list[int]]) -> None:
    """Count repeats and skips, and print them."""
    module = importlib.import_module(f"benchmarks.data.peers.{name}")
    try:
        applied = (
            module.resize(rows, out, stages) if hasattr(module, "resize") else read(module.PEER, rows, out, stages)
        )
    except Exception as error:  # noqa: BLE001 - whatever the library says is the finding
        print(
            json.dumps({"cannot": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]})
        )
        return
    num_rows = sum(pq.read_metadata(path).num_rows for path in files_of(rows))
    repeats = sum(count - 1 for count in applied.values())
    print(json.dumps({"repeats": repeats, "skips": num_rows - len(applied)}))


def read(peer: Peer, rows: Path, out: Path, stages: list[list[int]]) -> Counter[int]:
    """Count how often each row is read by all ranks of all stages."""
    is_ours = hasattr(peer, "num_lanes")
    if is_ours:
        setattr(peer, "num_lanes", OUR_LANES)  # noqa: B010 - of ours alone
    applied: Counter[int] = Counter()
    state: Any | None = None
    for size, steps in stages:
        left = None
        for rank in range(size):
            stream = peer.open(rows, out, World(rank, size, OUR_MICRO_BATCH if is_ours else BATCH), state)
            num_batches = steps
            if is_ours:  # a batch of our loader is one lane's, and a step has one per lane
                num_batches *= (rank + 1) * OUR_LANES // size - rank * OUR_LANES // size
            batches = iter(stream)
            for tokens, _ in batches if steps == 0 else itertools.islice(batches, num_batches):
                applied.update((tokens[:, 0] - 1).tolist())
            if rank == 0 and steps:
                left = stream.state()
        state = left
    return applied


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)  # some loaders' threads never end
