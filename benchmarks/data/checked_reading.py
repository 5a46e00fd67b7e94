"""Measure the cost of comparing row groups and cache entries with their checksums.

    python -m benchmarks.data.checked_reading [--rows 40000] [--rounds 7] [--folder FOLDER]

Everything is measured twice in turn, with checksums and without, in one process, and given as the median over the
rounds of the ratio of both. All are CPU time, of all threads. `decode` and `cached` are that of a row group, decoded or
taken from a filled cache; `step` is that of a training step with its loader, which reads ahead meanwhile: a classifier
of 2 layers of 64, and 8 lanes of 8 rows of 540 tokens on average, cut at 64. `share` is the share of such a step's CPU
time that is spent comparing, which other work on the machine hardly changes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from unittest import mock

import pyarrow.parquet as pq
import torch
from isal.isal_zlib import crc32

from benchmarks.data.rows import VOCABULARY, write_rows
from elastic_train.core.order import Cursor, Order
from elastic_train.data.dataset import row_groups
from elastic_train.data.dataset.manifest import Manifest, load_manifest
from elastic_train.data.dataset.row_groups import RowGroups
from elastic_train.data.loading import row_cache
from elastic_train.data.loading.loader import LaneLoader, SampleRules
from elastic_train.data.loading.reader import Reader
from elastic_train.data.loading.row_cache import RowCache
from elastic_train.data.parquet.chunks import Chunk
from elastic_train.data.parquet.footer_index import NAME as FOOTERS
from elastic_train.data.parquet.sources import Fetched
from elastic_train.tasks.text_classifier import TextClassifier

COLUMNS = ["input_ids", "label"]
LANES, MICRO_BATCH, STEPS = 8, 8, 12
PARAMS: dict[str, object] = {"max_tokens": 64, "dim": 64, "depth": 2, "heads": 4, "vocabulary": VOCABULARY}
Measure = Callable[[], float]


class Whatever:
    """A checksum that equals all others."""

    def __ne__(self, other: object) -> bool:
        return False


def decoding(manifest: Manifest) -> Measure:
    """Return a function that decodes all row groups and returns the CPU time per group."""
    groups = RowGroups(manifest, COLUMNS)

    def measure() -> float:
        began = time.process_time()
        for group in range(len(manifest.group_rows)):
            groups.decode(group)
        return (time.process_time() - began) / len(manifest.group_rows)

    return measure


def caching(manifest: Manifest, folder: Path, *, is_checked: bool) -> Measure:
    """Return a function that reads all row groups from a cache and returns the CPU time per group."""
    cache, groups = RowCache(folder, manifest, COLUMNS), RowGroups(manifest, COLUMNS)

    def measure() -> float:
        for group in range(len(manifest.group_rows)):
            cache.get(group, groups.decode)
        with mock.patch.object(row_cache, "crc32", crc32 if is_checked else lambda _: Whatever()):
            began = time.process_time()
            for group in range(len(manifest.group_rows)):
                cache.get(group, groups.decode)
            return (time.process_time() - began) / len(manifest.group_rows)

    return measure


def training(manifest: Manifest) -> Measure:
    """Return a function that trains some steps from the start and returns the CPU time per step."""
    task = TextClassifier(**PARAMS)  # type: ignore[arg-type]
    task.prepare(manifest)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = Order(manifest.group_rows, num_lanes=LANES, seed=1)

    def steps() -> Iterator[None]:
        rules = SampleRules(longest=task.longest(), truncates=True)
        place = {"lanes": range(LANES), "micro_batch": MICRO_BATCH, "cursor": Cursor(), "num_steps": STEPS + 1}
        for lanes in LaneLoader(Reader(manifest, task.columns()), order, task.collate, rules=rules, **place):  # type: ignore[arg-type]
            for batch in lanes:
                assert batch.tensors is not None
                torch.autograd.backward(task.loss(model, batch.tensors).total)
            optimizer.step()
            optimizer.zero_grad()
            yield

    def measure() -> float:
        running = steps()
        next(running)
        began = time.process_time()
        for _ in islice(running, STEPS):
            pass
        return (time.process_time() - began) / STEPS

    return measure


def main() -> int:
    """Print a line for each measurement, then one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data.checked_reading", description=__doc__)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the rows are made, on the disk that is measured")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as temporary:
        folder = Path(temporary)
        write_rows(folder / "checked", chosen.rows)
        shutil.copytree(folder / "checked", folder / "unchecked")
        footers = pq.read_table(folder / "unchecked" / FOOTERS).drop_columns(["chunk_crc32"])
        pq.write_table(footers, folder / "unchecked" / FOOTERS, write_page_checksum=True)
        checked, unchecked = (load_manifest(str(folder / name)) for name in ("checked", "unchecked"))
        pairs = {
            "decode": (decoding(checked), decoding(unchecked)),
            "cached": (
                caching(checked, folder / "cache", is_checked=True),
                caching(checked, folder / "cache", is_checked=False),
            ),
            "step": (training(checked), training(unchecked)),
        }
        ratios = {name: _compare(name, *pair, chosen.rounds) for name, pair in pairs.items()}
        share = statistics.median(share_of_comparing(checked) for _ in range(chosen.rounds))
    print(f"share    {share:.4f} of a step")
    found = {f"{name}_checked_vs_unchecked": ratio for name, ratio in ratios.items()}
    print(json.dumps({**found, "share_of_step": round(share, 5)}))
    return 0


def share_of_comparing(manifest: Manifest) -> float:
    """Return the share of a training step's CPU time that is spent comparing checksums."""
    compare, spent_s = row_groups._damaged, list[float]()

    def timed(file: Fetched, chunks: Sequence[Chunk]) -> list[Chunk]:
        began = time.thread_time()
        try:
            return compare(file, chunks)
        finally:
            spent_s.append(time.thread_time() - began)

    with mock.patch.object(row_groups, "_damaged", timed):
        step_s = training(manifest)()
    return sum(spent_s) / (step_s * STEPS)


def _compare(name: str, checked: Measure, unchecked: Measure, num_rounds: int) -> float:
    """Measure both in turn after one warm-up; return the median ratio."""
    checked(), unchecked()
    found = []
    for number in range(num_rounds):
        first, second = (checked, unchecked)[:: 1 if number % 2 else -1]
        pair = (first(), second())
        found.append(pair if number % 2 else pair[::-1])
    ratio = statistics.median(a / b for a, b in found)
    a, b = (1e3 * statistics.median(each) for each in zip(*found, strict=True))
    print(f"{name:<8} checked {a:8.3f} ms, unchecked {b:8.3f} ms, ratio {ratio:.3f}")
    return round(ratio, 4)


if __name__ == "__main__":
    sys.exit(main())
