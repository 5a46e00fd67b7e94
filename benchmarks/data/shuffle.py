"""Quality of shuffling a lane's blocks of K row groups, compared with a full shuffle.

32,768 rows in 128 row groups, sorted either by label (16 of them) or by source (64, each with its own labels and
features): the worst case of a dataset's file order. There are 8 lanes of 8 rows, few for a job: lanes start at
different positions, so more lanes mix better. The measured order is that of our `Order`, without files; weights begin
alike for each order.
"""

from __future__ import annotations

import math
import statistics

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.figures import Effort
from elastic_train.core.order import Order

NUM_ROWS, BATCH = 32_768, 64
NUM_LABELS, NUM_SOURCES, NUM_FEATURES, NUM_HELD_OUT = 16, 64, 32, 4096
SEEDS = range(5)
BLOCKS = (1, 2, 4, 8, 16)
LANES, GROUPS = 8, 128

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Batches = Ints
"""Row numbers of every step; shape (steps, rows)."""


def shuffling(effort: Effort) -> dict[str, object]:
    """Return composition, loss and distance from a full shuffle, by how the dataset was sorted and is ordered."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, object]] = {"composition": {}, "loss": {}, "off_full": {}}
    for sorted_by in ("label", "source"):
        for way, row in measure(sorted_by, SEEDS[:2] if effort.is_quick else SEEDS).items():
            for figure, value in row.items():
                found[figure][f"{way}, sorted by {sorted_by}"] = value
    return dict(found)


def measure(sorted_by: str, seeds: range) -> dict[str, dict[str, float]]:
    """Measure every way of ordering a dataset that is sorted by some key."""
    compositions: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    for seed in seeds:
        features, label, source = make_rows(seed)
        kind = label if sorted_by == "label" else source
        in_files = np.argsort(kind[:NUM_ROWS], kind="stable")
        for way, batches in ways(seed).items():
            rows = in_files[batches]
            compositions.setdefault(way, []).append(unlikeness(kind[rows]))
            losses.setdefault(way, []).append(train(features, label, rows, seed))
    return {
        way: {
            "composition": round(statistics.mean(compositions[way]), 3),
            "loss": round(statistics.mean(losses[way]), 4),
            "off_full": round(off(losses[way], losses["full shuffle"]), 2),
        }
        for way in compositions
    }


def ways(seed: int) -> dict[str, Batches]:
    """Return an epoch's steps by a full shuffle (and a second one, to show the noise), by each K, and unshuffled."""
    rng = np.random.default_rng([seed, 1])
    found = {name: rng.permutation(NUM_ROWS).reshape(-1, BATCH) for name in ("full shuffle", "another full")}
    rows = [NUM_ROWS // GROUPS] * GROUPS
    for block in BLOCKS:
        order = Order(rows, num_lanes=LANES, seed=seed, block_row_groups=block)
        found[f"K = {block}"] = steps_of(order)
    found["not shuffled"] = np.arange(NUM_ROWS).reshape(-1, BATCH)
    return found


def steps_of(order: Order) -> Batches:
    micro_batch = BATCH // order.num_lanes
    lanes = [order.epoch(0).ids(lane, 0, NUM_ROWS).reshape(-1, micro_batch) for lane in range(order.num_lanes)]
    return np.concatenate(lanes, axis=1)


def make_rows(seed: int) -> tuple[Floats, Ints, Ints]:
    """Draw rows whose labels can be learned from features; each source shifts its rows and prefers some labels."""
    rng = np.random.default_rng([seed, 0])
    num_rows = NUM_ROWS + NUM_HELD_OUT
    source = rng.integers(0, NUM_SOURCES, num_rows)
    shares = rng.dirichlet(np.full(NUM_LABELS, 0.5), NUM_SOURCES).cumsum(axis=1)
    label = (rng.random(num_rows)[:, None] > shares[source]).sum(axis=1).clip(max=NUM_LABELS - 1)
    centres, shifts = rng.normal(size=(NUM_LABELS, NUM_FEATURES)), rng.normal(size=(NUM_SOURCES, NUM_FEATURES))
    features = centres[label] + 0.7 * shifts[source] + 1.5 * rng.normal(size=(num_rows, NUM_FEATURES))
    return features.astype(np.float32), label.astype(np.int64), source.astype(np.int64)


def unlikeness(kinds: Ints) -> float:
    """Return the steps' mean chi-square per degree of freedom against the kinds' shares in all rows."""
    num_kinds = int(kinds.max()) + 1
    shares = np.bincount(kinds.reshape(-1), minlength=num_kinds) / kinds.size
    counts = np.stack([np.bincount(step, minlength=num_kinds) for step in kinds])
    expected = shares * kinds.shape[1]
    return float((((counts - expected) ** 2 / expected).sum(axis=1) / (num_kinds - 1)).mean())


def train(features: Floats, label: Ints, batches: Batches, seed: int) -> float:
    """Train for an epoch of the given steps; return the loss on held-out rows."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(NUM_FEATURES, 64), nn.GELU(), nn.Linear(64, NUM_LABELS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inputs, targets = torch.from_numpy(features), torch.from_numpy(label)
    for batch in torch.from_numpy(batches):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[batch]), targets[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        return float(F.cross_entropy(model(inputs[NUM_ROWS:]), targets[NUM_ROWS:]))


def off(losses: list[float], full: list[float]) -> float:
    """Return the mean difference to a full shuffle over the seeds, in standard errors."""
    differences = [loss - other for loss, other in zip(losses, full, strict=True)]
    spread = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.mean(differences) / spread if spread else 0.0
