"""The account of a run's samples: coverage sums, what they must equal, and the holes, in numbers that a commit keeps.

The sums say which samples were applied. The account says which were skipped: holes, row groups that could not be read,
each from a step on. So at an epoch's end the sums must equal the closed form over all ids minus those of the holes, and
at any step applied and skipped samples add up to the positions of the order.

Coverage sums are three integers that prove which samples were applied, whatever the order and the world.

Every applied sample adds 1 to a count and its id, mixed in two independent ways, to two sums modulo 2^64. Addition
commutes, so ranks and lanes may add in any order. At an epoch's end the sums must equal the closed form over
[0, num_samples); a repeat and a skip can cancel only if both mixed sums collide at once (about 2^-128).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from elastic_train.core.arrays import Int64s, Ranges
from elastic_train.core.keyed_random import mix64_array
from elastic_train.errors import CoverageError

_MASK = (1 << 64) - 1
_SALT_A, _SALT_B = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class CoverageSums:
    """Number of applied samples, and the two sums of their mixed ids, modulo 2^64.

    Sums add and subtract, so those of ranks, lanes and steps combine in any order. After a whole epoch they equal
    `CoverageSums.of_all(num_samples)`, or a sample was repeated or skipped.
    """

    count: int = 0
    sum_a: int = 0
    sum_b: int = 0

    def __str__(self) -> str:
        return f"{self.count:,} (sums {self.sum_a:016x} {self.sum_b:016x})"

    def __add__(self, other: CoverageSums) -> CoverageSums:
        return CoverageSums(
            self.count + other.count, (self.sum_a + other.sum_a) & _MASK, (self.sum_b + other.sum_b) & _MASK
        )

    def __sub__(self, other: CoverageSums) -> CoverageSums:
        return CoverageSums(
            self.count - other.count, (self.sum_a - other.sum_a) & _MASK, (self.sum_b - other.sum_b) & _MASK
        )

    def __mul__(self, times: int) -> CoverageSums:
        return CoverageSums(self.count * times, (self.sum_a * times) & _MASK, (self.sum_b * times) & _MASK)

    @classmethod
    def of_ids(cls, ids: Int64s) -> CoverageSums:
        """Sum over the given sample ids, repeats included."""
        words = ids.astype(np.uint64)
        sum_a = int(mix64_array(words + _SALT_A).sum(dtype=np.uint64))
        sum_b = int(mix64_array(mix64_array(words ^ _SALT_B) + _SALT_B).sum(dtype=np.uint64))
        return cls(int(words.size), sum_a, sum_b)

    @classmethod
    def of_all(cls, num_samples: int) -> CoverageSums:
        """Return what one whole epoch must add: the sum over [0, num_samples)."""
        return cls.of_range(0, num_samples)

    @classmethod
    def of_range(cls, lo: int, hi: int) -> CoverageSums:
        """Return the sum over the ids [lo, hi), in constant memory."""
        total = cls()
        for first in range(lo, hi, _CHUNK):
            total += cls.of_ids(np.arange(first, min(first + _CHUNK, hi), dtype=np.int64))
        return total


@dataclass(frozen=True, slots=True)
class Hole:
    """A row group that could not be read, or samples in one that crash the process that computes them.

    The samples [lo, hi) are skipped from step `since` in `epoch` on. `applied_before` are the ids that this epoch had
    applied before, as half-open ranges. `group` is the row group's number through all files, `row_group` its number in
    its file. In a mixture the epoch is the source's first one unfinished in some lane, and `applied_before` includes
    what some lanes had applied of later ones: an id may occur repeatedly.
    """

    group: int
    file: str
    row_group: int
    lo: int
    hi: int
    since: int
    epoch: int
    applied_before: Ranges = field(metadata={"alias": "kept"})  # `kept` is its frozen key in stored files
    why: str

    def left_out_of(self, epoch: int) -> Ranges:
        """Return the ids that a finished epoch lacks, as half-open ranges."""
        if epoch < self.epoch:
            return ()
        if epoch > self.epoch:
            return ((self.lo, self.hi),)
        bounds = [self.lo, *(bound for applied in self.applied_before for bound in applied), self.hi]
        return tuple((lo, hi) for lo, hi in zip(bounds[::2], bounds[1::2], strict=True) if lo < hi)

    def overlaps(self, other: Hole) -> bool:
        """Return True if two different holes share samples."""
        return self.lo < other.hi and other.lo < self.hi and (self.lo, self.hi) != (other.lo, other.hi)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields under their keys in stored files."""
        return {each.metadata.get("alias", each.name): getattr(self, each.name) for each in fields(self)}

    def __str__(self) -> str:
        return f"row group {self.row_group} of {self.file}, samples [{self.lo}, {self.hi}), from step {self.since} on"


@dataclass(frozen=True, slots=True)
class SampleAccount:
    """A run's account of samples, in addition to their sums.

    `epochs` are the coverage sums at the end of every finished epoch, since the start. `holes` are those in effect.
    `left_out` and `truncated` count positions in holes, and rows truncated for length, so far.
    """

    epochs: tuple[CoverageSums, ...] = ()
    holes: tuple[Hole, ...] = ()
    left_out: int = 0
    truncated: int = 0

    def advance(self, step: int, holes: Iterable[Hole], left_out: int, truncated: int) -> SampleAccount:
        """Return the account after one more step, counted from 0, with `holes` known."""
        in_effect = tuple(hole for hole in holes if hole.since <= step)
        return SampleAccount(self.epochs, in_effect, self.left_out + left_out, self.truncated + truncated)

    def end_epoch(self, coverage: CoverageSums) -> SampleAccount:
        """Return the account with the sums at the end of an epoch."""
        return replace(self, epochs=(*self.epochs, coverage))


def check_epoch(number: int, whole: CoverageSums, account: SampleAccount, total: CoverageSums) -> None:
    """Raise CoverageError if a finished epoch did not apply each of its samples once.

    `whole` is an epoch's closed form, `account` the account before the epoch is added, `total` the sums at its end
    since the start of the run. Runs whose first commits had no epoch sums are not checked.
    """
    if len(account.epochs) != number:
        return
    found = total - (account.epochs[-1] if account.epochs else CoverageSums())
    expected = expected_sums(whole, account.holes, number + 1) - expected_sums(whole, account.holes, number)
    if found == expected:
        return
    raise CoverageError(
        f"the samples of epoch {number} were not applied once each: {found} were counted, {expected} are expected, so "
        "some were repeated or left out. The epoch's last step was not applied, and no commit has it. This is a defect "
        "of the program or of a machine's memory, not of the data: `elastic-train audit --forensic` names the samples "
        "if run.forensic was set; to train on, remove this epoch's commits and start again from the one before"
    )


def expected_sums(whole: CoverageSums, holes: Sequence[Hole], num_epochs: int) -> CoverageSums:
    """Return the expected sums after epochs: the closed form of a `whole` one, minus what holes skipped."""
    total = whole * num_epochs
    for hole in holes:
        for lo, hi in hole.left_out_of(hole.epoch) if hole.epoch < num_epochs else ():
            total -= CoverageSums.of_range(lo, hi)
        total -= CoverageSums.of_range(hole.lo, hole.hi) * max(0, num_epochs - hole.epoch - 1)
    return total
