"""The cost of recording which samples were applied, and the savings by length bucketing.

    python -m benchmarks.data.samples

* Coverage: the time of a step's coverage sums over that of the step. The step is forward and backward of the text
  classifier (4 layers of 256) on 8 lanes of 8 rows of 128 tokens on one thread: small, so that the share is large.
* Padding: lognormal lengths, 540 tokens on average up to 2,048, 64 lanes of 8 rows, padded to the micro-batch's
  longest, unsorted and in buckets of several windows. `padding` is the share of positions that are padding; `imbalance`
  is the excess work of the busiest of 8 ranks in a step over the mean, for which the others wait.
* Order: the extra cost of bucketing when asking for a lane's next 4,096 ids.

All times are CPU times of one thread, so that other work on the machine does not count.

`--json` prints one JSON object as the last line.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from elastic_train.core.coverage import CoverageSums
from elastic_train.core.lanes import owned_lanes
from elastic_train.core.length_buckets import LengthBuckets
from elastic_train.core.order import Order
from elastic_train.tasks.models.text_encoder import EncoderShape, TextEncoder

NUM_ROWS, ROWS_PER_GROUP, NUM_LANES, MICRO_BATCH, NUM_RANKS = 400_000, 2000, 64, 8, 8
WINDOWS = (16, 64, 256)
ROUNDS, STEP_ROUNDS = 15, 3

Ints = npt.NDArray[np.int64]


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    found = {**coverage_share(), **padding()}
    if "--json" in arguments:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:28} {value:.5g}")


def coverage_share() -> dict[str, float]:
    """Time a small step's lanes and their coverage sums, in turn."""
    shape = EncoderShape(
        vocabulary=4096,
        num_classes=2,
        max_tokens=128,
        dim=256,
        depth=4,
        num_heads=4,
        dropout=0.1,
        num_numeric=0,
        num_categorical=0,
        category_buckets=2,
    )
    model, rng = TextEncoder(shape), np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(1, 4096, (8, 128)))
    lengths, label = torch.full((8,), 128), torch.from_numpy(rng.integers(0, 2, 8))
    nothing = torch.zeros((8, 0))
    ids = [rng.integers(0, 42_000_000, 8) for _ in range(8)]
    step_s, sums_s = [], []
    for _ in range(STEP_ROUNDS):
        started_s = time.thread_time()
        for _lane in range(8):
            F.cross_entropy(model(tokens, lengths, nothing, nothing, nothing.long()), label).backward()  # type: ignore[no-untyped-call]
        middle_s = time.thread_time()
        CoverageSums.of_ids(np.concatenate(ids))
        sums_s.append(time.thread_time() - middle_s)
        step_s.append(middle_s - started_s)
    step, sums = statistics.median(step_s), statistics.median(sums_s)
    return {"step_ms": 1e3 * step, "coverage_ms": 1e3 * sums, "coverage_share": sums / step}


def padding() -> dict[str, float]:
    """Measure padding and imbalance of an epoch's steps, unsorted and in buckets."""
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(6.03, 0.75, NUM_ROWS), 16, 2048).astype(np.int64)
    rows = [ROWS_PER_GROUP] * (NUM_ROWS // ROWS_PER_GROUP)
    found: dict[str, float] = {}
    for window_steps in (0, *WINDOWS):
        buckets = LengthBuckets(lengths.__getitem__, MICRO_BATCH, window_steps=window_steps) if window_steps else None
        order = Order(rows, num_lanes=NUM_LANES, seed=1, arrangement=buckets)
        name = f"window_{window_steps}" if window_steps else "as_they_come"
        widths, used = widths_of(order, lengths)
        found[f"{name}_padding"] = 1 - used / (MICRO_BATCH * float(widths.sum()))
        found[f"{name}_imbalance"] = imbalance(widths)
        found[f"{name}_ids_ms"] = ids_ms(order)
    return found


def widths_of(order: Order, lengths: Ints) -> tuple[Ints, int]:
    """Return the widths of micro-batches in whole steps, shape (steps, lanes), and the number of values in them."""
    num_steps = order.num_samples // order.num_lanes // MICRO_BATCH
    widths, used = np.empty((num_steps, order.num_lanes), dtype=np.int64), 0
    for lane in range(order.num_lanes):
        ids = order.epoch(0).ids(lane, 0, num_steps * MICRO_BATCH)
        of_lane = lengths[ids].reshape(num_steps, MICRO_BATCH)
        widths[:, lane], used = of_lane.max(axis=1), used + int(of_lane.sum())
    return widths, used


def imbalance(widths: Ints) -> float:
    """Return the excess work of a step's busiest rank over the mean, over all steps."""
    ranks = [owned_lanes(rank, NUM_RANKS, NUM_LANES) for rank in range(NUM_RANKS)]
    work = np.stack([widths[:, lanes.start : lanes.stop].sum(axis=1) for lanes in ranks], axis=1)
    return float(work.max(axis=1).sum() / work.mean(axis=1).sum()) - 1


def ids_ms(order: Order) -> float:
    """Time asking for the next 4,096 ids of a lane."""
    epoch, times = order.epoch(0), []
    for number in range(ROUNDS):
        started_s = time.thread_time()
        epoch.ids(number, 512, 512 + 4096)
        times.append(time.thread_time() - started_s)
    return 1e3 * statistics.median(times)


if __name__ == "__main__":
    main(sys.argv[1:])
