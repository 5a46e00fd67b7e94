"""Invariants of samples: every position of every epoch is applied once, and the sums over what was read confirm it.

Lineage intervals, row counts of what was read, and mixed sums against their closed form are independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from chaos.judge.dealt_order import DealtOrder, Ids, mix
from chaos.judge.evidence.applied import Applied, counts_of, first_miscount, lineage_of, result_of, shape_of
from chaos.judge.evidence.holes import Hole, coverage_counts, holes_of, left_out_of, num_missing, total_left_out
from chaos.judge.evidence.run_files import Evidence, Line, manifests_of, part, row_groups_of, whole
from chaos.judge.findings import Unknown, Violated
from chaos.judge.invariants.exactly_once.agreement import differ
from chaos.judge.job_shape import MixedShape, Shape
from chaos.judge.mixed_sources import check_sources

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
