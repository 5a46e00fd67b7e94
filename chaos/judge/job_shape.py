"""The arithmetic of a job: samples per step, and for mixtures the passes of each source.

Computed from its definition, from the configuration and the manifests' rows alone, to check what a run says of itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


_AXES = ("tensor", "pipeline", "expert", "context")
"""Axes of `parallel` that split a replica over several ranks."""


def cell_size(config: Mapping[str, object]) -> int:
    """Return how many ranks hold a replica together."""
    parallel = config.get("parallel")
    return math.prod(int(parallel.get(axis, 1)) for axis in _AXES) if isinstance(parallel, dict) else 1


def stage_size(config: Mapping[str, object]) -> int:
    """Return how many ranks of a replica form one pipeline stage."""
    parallel = config.get("parallel")
    return cell_size(config) // (int(parallel.get("pipeline", 1)) if isinstance(parallel, dict) else 1)


def context_size(config: Mapping[str, object]) -> int:
    """Return how many context-parallel peers in a cell hold the same parameter shard."""
    parallel = config.get("parallel")
    return int(parallel.get("context", 1)) if isinstance(parallel, dict) else 1


@dataclass(frozen=True, slots=True)
class Crews:
    """Compute groups: the ranks of a cell, or those of them with the same experts in each stage."""

    cell: int
    num_crews: int
    stride: int
    """Distance between the places of neighbouring compute groups."""

    @classmethod
    def of(cls, config: Mapping[str, object]) -> Crews:
        parallel = config.get("parallel")
        experts = int(parallel.get("expert", 1)) if isinstance(parallel, dict) else 1
        return cls(cell_size(config), experts, context_size(config))

    @property
    def size(self) -> int:
        return self.cell // self.num_crews

    def crew_of(self, rank: int) -> int:
        """Return the number of a rank's compute group, in [0, ranks / size)."""
        cell, place = divmod(rank, self.cell)
        return cell * self.num_crews + place // self.stride % self.num_crews

    def number_of(self, place: int) -> int:
        """Return the rank within its compute group of a place, in [0, size)."""
        group, at = divmod(place, self.stride * self.num_crews)
        return group * self.stride + at % self.stride


def has_parts(config: Mapping[str, object]) -> bool:
    """Return True if ranks of a cell hold different parameter shards."""
    return cell_size(config) > context_size(config)


@dataclass(frozen=True, slots=True)
class Shape:
    """Arithmetic of a job: lanes differ by at most one sample, an epoch ends with the longest."""

    rows: int
    num_lanes: int
    micro_batch: int
    total_steps: int

    @property
    def steps_per_epoch(self) -> int:
        longest = -(-self.rows // self.num_lanes)
        return -(-longest // self.micro_batch)

    @property
    def is_at_epoch_end(self) -> bool:
        return self.total_steps % self.steps_per_epoch == 0

    @property
    def finished_epochs(self) -> range:
        return range(self.total_steps // self.steps_per_epoch)

    @property
    def num_epochs(self) -> int:
        return -(-self.total_steps // self.steps_per_epoch)

    def offsets(self, epoch: int) -> int:
        """Return how many offsets of an epoch every lane has applied at the job's end."""
        steps = min(self.steps_per_epoch, self.total_steps - epoch * self.steps_per_epoch)
        return steps * self.micro_batch

    def samples_before(self, step: int) -> int:
        epochs, steps = divmod(step, self.steps_per_epoch)
        offset, short, num_long = steps * self.micro_batch, self.rows // self.num_lanes, self.rows % self.num_lanes
        return epochs * self.rows + num_long * min(offset, short + 1) + (self.num_lanes - num_long) * min(offset, short)

    def steps_of(self, epochs: int) -> int:
        return epochs * self.steps_per_epoch


@dataclass(frozen=True, slots=True)
class MixedShape(Shape):
    """A job on several sources: one endless epoch, with a sample at every position.

    `sizes` are the sources' rows, `shares` their integer shares: in one turn the k-th position of a source with share a
    is at (k + 1/2) / a. Lane l begins l / L of a turn later.
    """

    sizes: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()

    @property
    def steps_per_epoch(self) -> int:
        return self.total_steps + 1

    def samples_before(self, step: int) -> int:
        return step * self.micro_batch * self.num_lanes

    def steps_of(self, epochs: int) -> int:
        lo, hi = 0, 1
        while replace(self, total_steps=hi).passes()[0].min() < epochs:
            lo, hi = hi, 2 * hi
        while lo + 1 < hi:
            middle = (lo + hi) // 2
            is_enough = replace(self, total_steps=middle).passes()[0].min() >= epochs
            lo, hi = (lo, middle) if is_enough else (middle, hi)
        return hi

    def applied(self) -> Counts:
        """Count the applied positions of each source per lane; shape (lanes, sources)."""
        turn = _turn_of(self.shares)
        places, counts = self.total_steps * self.micro_batch, []
        for lane in range(self.num_lanes):
            begin = lane * len(turn) // self.num_lanes
            turns, rest = divmod(places, len(turn))
            last = np.take(turn, np.arange(begin, begin + rest), mode="wrap")
            counts.append(turns * np.array(self.shares) + np.bincount(last, minlength=len(self.shares)))
        return np.array(counts)

    def passes(self) -> tuple[Counts, Counts]:
        """Return how often each source was passed by all lanes, and how often any lane began a pass; shape (sources,).

        After e epochs of n samples lane l of L has applied (l + e) * n // L - l * n // L.
        """
        whole, begun = [], []
        for counts, size in zip(self.applied().T, self.sizes, strict=True):
            lanes = np.arange(self.num_lanes)
            before = lanes * size // self.num_lanes
            ends = ((counts + before + 1) * self.num_lanes - 1) // size - lanes
            is_at_end = (lanes + ends) * size // self.num_lanes - before == counts
            whole.append(int(ends.min()))
            begun.append(int((ends + ~is_at_end).max()))
        return np.array(whole), np.array(begun)


@lru_cache(8)
def _turn_of(shares: Sequence[int]) -> Counts:
    stands = sorted((Fraction(2 * k + 1, 2 * share), at) for at, share in enumerate(shares) for k in range(share))
    return np.array([at for _, at in stands])
