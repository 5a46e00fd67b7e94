"""Invariants of samples: every position of every epoch is applied once, and the sums over what was read confirm it.

Lineage intervals, row counts of what was read, and mixed sums against their closed form are independent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from chaos.judge.evidence.applied import (
    Applied,
    counts_of,
    first_miscount,
    lineage_of,
    result_of,
    shape_of,
    skipped_steps,
)
from chaos.judge.evidence.holes import Hole, coverage_counts, holes_of, left_out_of, num_missing, total_left_out
from chaos.judge.evidence.run_files import Evidence, Line, items, manifests_of, part, row_groups_of, whole
from chaos.judge.findings import Unknown, Violated
from chaos.judge.invariants.exactly_once.agreement import differ
from chaos.judge.job_shape import MixedShape, Shape
from chaos.scenario.kinds import kind_of

_MASK = (1 << 64) - 1
_CHUNK = 1 << 20
_MOST_ROWS = 1 << 22
"""Larger training sets are checked at epoch ends only: an epoch's order is held in memory."""


def coverage(run: Evidence) -> str:
    """Every position of every epoch is in the lineage exactly once, and every step read all its samples, holes
    aside."""
    shape, holes = shape_of(run), holes_of(result_of(run))
    if (where := first_miscount(run)) is not None:
        raise Violated(where)
    for applied in lineage_of(run):
        expected = shape.samples_before(applied.step) - shape.samples_before(applied.step - 1)
        read, left_out = whole(applied.lines[0], "num_samples"), left_out_of(applied.lines[0])
        where = f"step {applied.step} of term {applied.term}"
        if left_out and not any(hole.since < applied.step for hole in holes):
            raise Violated(f"{where} left out {left_out} samples, and no hole is listed that begins before it")
        if read + left_out != expected:
            raise Violated(f"{where} read {read} samples and left out {left_out}, it should be {expected} in all")
    left_out = _check_left_out(shape, holes, lineage_of(run))
    _check_cause(run)
    least, most = coverage_counts(run)
    if (least, most) != (1, 1):
        raise Violated(f"by the witness, samples were applied {least} to {most} times an epoch")
    places = sum(counts.size for counts in counts_of(run).values())
    summary = f"{shape.rows} samples, {shape.num_epochs} epochs, {places} places, each exactly once"
    return f"{summary}, but for {left_out} in {len(holes)} holes that are listed" if holes else summary


def _check_left_out(shape: Shape, holes: list[Hole], lineage: list[Applied]) -> int:
    """Every finished epoch skipped as many samples as the holes list; return how many the lineage skipped."""
    for epoch in shape.finished_epochs:
        last = (epoch + 1) * shape.steps_per_epoch
        left_out = total_left_out([x for x in lineage if last - shape.steps_per_epoch < x.step <= last])
        if left_out != (listed := num_missing(holes, range(epoch, epoch + 1))):
            raise Violated(f"epoch {epoch} left out {left_out} samples, but the holes list {listed}")
    return total_left_out(lineage)


def _check_cause(run: Evidence) -> None:
    """A fault made the row group of every hole unreadable: the run without faults is given the same holes.

    Who trains on data that are damaged has no scenario: then the list of holes says what was left out.
    """
    result = result_of(run)
    if not run.has("scenario"):
        return
    spoilt = {(x.get("file"), x.get("row_group")) for x in run.of("fault") if kind_of(x["kind"]).aim == "data"}
    for hole in (line for line in items(result, "holes") if isinstance(line, dict)) if "holes" in result else ():
        if (place := (hole.get("file"), hole.get("row_group"))) not in spoilt:
            where = f"row group {place[1]} of {place[0]}: samples [{hole['lo']}, {hole['hi']})"
            raise Unknown(f"{where} are left out from step {hole['since']} on, and no fault explains it")


def sums(run: Evidence, reference: Evidence | None) -> str:
    """The sums over samples actually read are, in commits and result, those expected at their step.

    They follow from the sample order; at an epoch's end from the closed form.
    """
    shape, result = shape_of(run), result_of(run)
    left_out = whole(result, "num_left_out") if "num_left_out" in result else 0
    claimed = [Claim("the result", whole(result, "step"), part(result, "coverage"), holes_of(result), left_out)]
    claimed += [_claim(commit.key, commit.fields) for commit in run.commits if commit.fields is not None]
    order = _order_of(run, shape)
    known = [claim for claim in claimed if _check_sums(shape, order, claim)]
    if isinstance(shape, MixedShape):
        check_sources(shape, result)
    summary = f"{shape.num_epochs} epochs of {shape.rows} samples; {len(known)} of {len(claimed)} sums were worked out"
    if claimed[0] in known:
        return summary
    if reference is None:
        where = f"the job ended inside epoch {shape.num_epochs - 1}"
        raise Unknown(f"{where}, and there is no run without faults to compare with")
    if differ(part(result_of(reference), "coverage"), result["coverage"]):
        raise Violated("the coverage sums differ from those of the run without faults")
    return f"{summary}; the job ended inside an epoch, and its sums are those of the run without faults"


def _order_of(run: Evidence, shape: Shape) -> DealtOrder | None:
    """Return the sample order of one dataset; None where it is not computed: mixtures and bucketed rows."""
    config, manifests = run.config, manifests_of(run.folder, run.config)
    job, data = (part(config, name) if name in config else {} for name in ("run", "data"))
    is_plain = not isinstance(shape, MixedShape) and not data.get("length_bucketing") and shape.rows <= _MOST_ROWS
    if not is_plain or len(manifests) != 1 or "seed" not in job or "block_row_groups" not in data:
        return None
    rows = tuple(row_groups_of(manifests[0]))
    return DealtOrder(rows, shape.num_lanes, whole(data, "block_row_groups"), whole(job, "seed"))


@dataclass(frozen=True, slots=True)
class Claim:
    """A result's or commit's claim about its samples up to a step: sums, holes, and the number skipped."""

    whose: str
    step: int
    sums: Line
    holes: list[Hole]
    left_out: int


def _claim(key: str, fields: Line) -> Claim:
    account: Line = part(fields, "account") if "account" in fields else {"left_out": 0}
    return Claim(key, whole(fields, "step"), part(fields, "coverage"), holes_of(account), whole(account, "left_out"))


def _check_sums(shape: Shape, order: DealtOrder | None, claim: Claim) -> bool:
    """Check a claim's count, and its sums if they can be computed; return True if they could."""
    expected, count = shape.samples_before(claim.step), whole(claim.sums, "count")
    if count + claim.left_out != expected:
        counted = f"{count} samples counted up to step {claim.step} and {claim.left_out} left out"
        raise Violated(f"{claim.whose}: {counted}, it should be {expected} in all")
    times, steps = divmod(claim.step, shape.steps_per_epoch)
    if not steps and claim.left_out != (listed := num_missing(claim.holes, range(times))):
        raise Violated(f"{claim.whose}: {claim.left_out} samples left out, but its holes list {listed}")
    if steps and order is None:
        return False
    due = sums_of_epochs(shape.rows, claim.holes, times)
    if steps and order is not None:
        ids = order.ids_before(times, steps * shape.micro_batch)
        for lo, hi in (pair for hole in claim.holes for pair in hole.missing(times)):
            ids = ids[(ids < lo) | (ids >= hi)]
        listed = expected - times * shape.rows - len(ids) + num_missing(claim.holes, range(times))
        if listed != claim.left_out:
            raise Violated(f"{claim.whose}: {claim.left_out} samples left out, but its holes list {listed}")
        sum_a, sum_b = _sums(ids)
        due = due[0] + sum_a & _MASK, due[1] + sum_b & _MASK
    for sum_due, name in zip(due, ("sum_a", "sum_b"), strict=True):
        if whole(claim.sums, name) != sum_due:
            which = f"{times} epochs of {shape.rows} samples" + (f" and {steps} steps" if steps else "")
            which += " less the listed holes" if claim.holes else ""
            rule = "what the order has" if steps else "the closed form's"
            raise Violated(f"{claim.whose}: {name} after {which} is not {rule}")
    return True


def sums_of_epochs(rows: int, holes: Sequence[Hole], times: int) -> tuple[int, int]:
    """Return the two coverage sums after whole epochs, minus holes."""
    missing = [pair for hole in holes for number in range(times) for pair in hole.missing(number)]
    absent = [sum_over(lo, hi) for lo, hi in missing]
    sum_a, sum_b = closed_form(rows)
    absent_a, absent_b = (sum(sums[place] for sums in absent) for place in (0, 1))
    return sum_a * times - absent_a & _MASK, sum_b * times - absent_b & _MASK


@lru_cache(8)
def closed_form(rows: int) -> tuple[int, int]:
    """Return the two coverage sums of one whole epoch, computed here from their definition."""
    return sum_over(0, rows)


def sum_over(lo: int, hi: int) -> tuple[int, int]:
    """Return the two sums over the ids [lo, hi)."""
    sum_a = sum_b = 0
    for first in range(lo, hi, _CHUNK):
        more = _sums(np.arange(first, min(first + _CHUNK, hi), dtype=np.uint64))
        sum_a, sum_b = sum_a + more[0], sum_b + more[1]
    return sum_a & _MASK, sum_b & _MASK


def _sums(ids: Ids) -> tuple[int, int]:
    salt_a, salt_b = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
    sum_a, sum_b = mix(ids + salt_a).sum(dtype=np.uint64), mix(mix(ids ^ salt_b) + salt_b).sum(dtype=np.uint64)
    return int(sum_a), int(sum_b)


def check_sources(shape: MixedShape, result: Line) -> None:
    """Compare the result's claim for each source with its number of lane positions."""
    applied, (passes, _) = shape.applied().sum(axis=0), shape.passes()
    has_holes = bool(holes_of(result))
    for at, said in enumerate(line for line in items(result, "sources") if isinstance(line, dict)):
        count = whole(said, "applied")
        if count > applied[at] or (count < applied[at] and not has_holes):
            raise Violated(f"source {said['name']}: {count} samples counted, its places are {applied[at]}")
        epochs = whole(said, "epochs") if "epochs" in said else passes[at]
        if (whole(said, "num_samples"), epochs) != (shape.sizes[at], passes[at]):
            due = f"{passes[at]} of {shape.sizes[at]}"
            raise Violated(f"source {said['name']}: {epochs} epochs of {said['num_samples']} samples, not {due}")


def witness_of_sources(run: Evidence, shape: MixedShape, counts: npt.NDArray[np.int64]) -> str:
    """Every sample counts once in each finished epoch of its source, and at most once in those that lanes began."""
    whole_passes, begun = shape.passes()
    first, applied = 0, shape.applied().sum(axis=0)
    for source, size in enumerate(shape.sizes):
        own = counts[first : first + size]
        is_left_out = np.zeros(size, dtype=bool)
        for hole in holes_of(result_of(run)):
            is_left_out[max(0, hole.lo - first) : max(0, hole.hi - first)] = True
        num_skipped = len(skipped_steps(result_of(run))) * shape.micro_batch * shape.num_lanes
        too_few = (own < whole_passes[source] - num_skipped) & ~is_left_out
        if (wrong := np.flatnonzero(too_few | (own > begun[source]))).size:
            place = int(wrong[0])
            due = f"{whole_passes[source]} to {begun[source]}"
            raise Violated(
                f"sample {first + place}, of source {source}, was applied {own[place]} times, it should be {due}"
            )
        if not is_left_out.any() and not num_skipped and int(own.sum()) != applied[source]:
            raise Violated(f"source {source}: {int(own.sum())} samples were applied, its places are {applied[source]}")
        first += size
    return f"{len(counts)} weights, each as often as its source was passed ({', '.join(map(str, whole_passes))} times)"


Ids = npt.NDArray[np.uint64]
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 8


def mix(x: Ids) -> Ids:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class DealtOrder:
    """The sample order of a job: rows per row group, lanes, row groups per block, seed.

    Compute the samples that all lanes have applied by a step of an epoch, from docs/arithmetic.md alone.

    Valid for one dataset without length bucketing. Commits in the middle of an epoch must have matching coverage
    sums.
    """

    rows: tuple[int, ...]
    num_lanes: int
    block: int
    seed: int

    def ids_before(self, epoch: int, offset: int) -> Ids:
        """Return the ids at the first `offset` positions of every lane in an epoch."""
        return np.concatenate([self._of_lane(epoch, lane, offset) for lane in range(self.num_lanes)])

    def _of_lane(self, epoch: int, lane: int, most: int) -> Ids:
        line, starts = _line_of(self, epoch)
        begin, end = lane * len(line) // self.num_lanes, (lane + 1) * len(line) // self.num_lanes
        last, found, num_found = bisect_right(starts, end - 1), [np.empty(0, np.uint64)], 0
        for number, place in enumerate(range(bisect_right(starts, begin) - 1, last, self.block)):
            if num_found >= most or begin == end:
                break
            lo, hi = max(begin, starts[place]), min([end, *starts[place + self.block : place + self.block + 1]])
            key = _derive(self.seed, epoch, 2, lane, number)
            found.append(line[lo:hi][_permute(np.arange(hi - lo, dtype=np.uint64), hi - lo, key)])
            num_found += hi - lo
        return np.concatenate(found)[:most]


@lru_cache(8)
def _line_of(order: DealtOrder, epoch: int) -> tuple[Ids, list[int]]:
    """Return all ids in the order of an epoch's row groups, and the start of each group."""
    groups = _groups_in_line(len(order.rows), order.num_lanes, order.block, _derive(order.seed, epoch, 1))
    first = [0, *accumulate(order.rows)]
    line = np.concatenate([np.arange(first[group], first[group + 1], dtype=np.uint64) for group in groups])
    return line, [0, *accumulate(order.rows[group] for group in groups)]


def _groups_in_line(num: int, lanes: int, block: int, key: int) -> list[int]:
    turns = [(place - -(-(place * lanes // num) * num // lanes)) // block for place in range(num)]
    counts = Counter(turns)
    sizes = [counts[turn] for turn in range(max(turns) + 1)]
    drawn = _permute(np.arange(sizes[0], dtype=np.uint64), sizes[0], _derive(key, 1)).tolist()
    lengths = [sum(size > each for size in sizes) for each in drawn]
    dealt = _sorted([row for row, length in enumerate(lengths) for _ in range(length)], _derive(key, 2))
    turn_of = dict(zip(dealt, (turn for length in lengths for turn in range(length)), strict=True))
    groups = _sorted([turn_of[group] for group in range(num)], _derive(key, 3))
    places = sorted(range(num), key=lambda place: (turns[place], place))
    return [group for _, group in sorted(zip(places, groups, strict=True))]


def _sorted(classes: Sequence[int], key: int) -> list[int]:
    """Return the indices sorted by class; within a class in an order drawn from the key."""
    shift = 2 * len(classes).bit_length()
    drawn = [mixed >> shift for mixed in mix(np.arange(len(classes), dtype=np.uint64) ^ np.uint64(key)).tolist()]
    return sorted(range(len(classes)), key=lambda index: (classes[index], drawn[index], index))


def _derive(*words: int) -> int:
    key = 0
    for word in words:
        key = _mix_one((key + _GOLDEN & _WORD) ^ _mix_one(word + _GOLDEN & _WORD))
    return key


def _mix_one(word: int) -> int:
    return int(mix(np.array([word], np.uint64))[0])


def _permute(x: Ids, num: int, key: int) -> Ids:
    """Return the Feistel permutation of [0, num), by cycle walking."""
    if num <= 1:
        return np.zeros_like(x)
    bits = max(2, (num - 1).bit_length())
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    keys = [np.uint64(_derive(key, each)) for each in range(_ROUNDS)]
    found, left = x.copy(), np.arange(len(x))
    while left.size:
        low, high = found[left] & low_mask, found[left] >> low_bits
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            high = high ^ (mix(low + even) & high_mask)
            low = low ^ (mix(high + odd) & low_mask)
        found[left] = (high << low_bits) + low
        left = left[found[left] >= num]
    return found
