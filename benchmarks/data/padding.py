"""Padding and imbalance of an epoch's steps, unsorted and in length buckets.

Lognormal lengths, 540 tokens on average up to 2,048, 64 lanes of 8 rows, padded to the micro-batch's longest, unsorted
and in buckets of several windows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmarks.figures import Effort
from elastic_train.core.lanes import owned_lanes
from elastic_train.core.order import LengthBuckets, Order

NUM_ROWS, ROWS_PER_GROUP, NUM_LANES, MICRO_BATCH, NUM_RANKS = 400_000, 2000, 64, 8, 8
WINDOWS = (16, 64, 256)

Ints = npt.NDArray[np.int64]


def padding(effort: Effort) -> dict[str, object]:
    """Return the share of positions that are padding, and the excess work of a step's busiest rank."""
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(6.03, 0.75, NUM_ROWS), 16, 2048).astype(np.int64)
    rows = [ROWS_PER_GROUP] * (NUM_ROWS // ROWS_PER_GROUP)
    shares, excess = dict[str, float](), dict[str, float]()
    for window_steps in (0, *WINDOWS):
        buckets = LengthBuckets(lengths.__getitem__, MICRO_BATCH, window_steps=window_steps) if window_steps else None
        order = Order(rows, num_lanes=NUM_LANES, seed=1, arrangement=buckets)
        name = f"window_{window_steps}" if window_steps else "as_they_come"
        widths, used = _widths_of(order, lengths)
        shares[name] = round(1 - used / (MICRO_BATCH * float(widths.sum())), 4)
        excess[name] = round(_imbalance(widths), 4)
    return {"padding": shares, "imbalance": excess}


def _widths_of(order: Order, lengths: Ints) -> tuple[Ints, int]:
    """Return the widths of micro-batches in whole steps, shape (steps, lanes), and the number of values in them."""
    num_steps = order.num_samples // order.num_lanes // MICRO_BATCH
    widths, used = np.empty((num_steps, order.num_lanes), dtype=np.int64), 0
    for lane in range(order.num_lanes):
        ids = order.epoch(0).ids(lane, 0, num_steps * MICRO_BATCH)
        of_lane = lengths[ids].reshape(num_steps, MICRO_BATCH)
        widths[:, lane], used = of_lane.max(axis=1), used + int(of_lane.sum())
    return widths, used


def _imbalance(widths: Ints) -> float:
    """Return the excess work of a step's busiest rank over the mean, over all steps."""
    ranks = [owned_lanes(rank, NUM_RANKS, NUM_LANES) for rank in range(NUM_RANKS)]
    work = np.stack([widths[:, lanes.start : lanes.stop].sum(axis=1) for lanes in ranks], axis=1)
    return float(work.max(axis=1).sum() / work.mean(axis=1).sum()) - 1
