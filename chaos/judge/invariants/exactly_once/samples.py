"""Invariants of the samples: every place of every epoch is applied once, and the sums over what was read say so.

The intervals of the lineage, the row counts of what was read, and the mixed sums against their closed form share
nothing but the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chaos.judge.evidence.applied import Applied, counts_of, first_miscount, lineage_of, result_of, shape_of
from chaos.judge.evidence.holes import Hole, coverage_counts, holes_of, left_out_of, num_missing, total_left_out
from chaos.judge.evidence.run_files import Evidence, Line, part, whole
from chaos.judge.findings import Unknown, Violated
from chaos.judge.invariants.exactly_once.agreement import differ
from chaos.judge.job_shape import MixedShape, Shape
from chaos.judge.mixed_sources import check_sources

_MASK = (1 << 64) - 1
_CHUNK = 1 << 20


def coverage(run: Evidence) -> str:
    """Every place of every epoch is in the lineage exactly once, and every step read all its samples, holes aside."""
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
    """Every finished epoch left out as many samples as the holes list for it; return how many the lineage left out."""
    for epoch in shape.finished_epochs:
        last = (epoch + 1) * shape.steps_per_epoch
        left_out = total_left_out([x for x in lineage if last - shape.steps_per_epoch < x.step <= last])
        if left_out != (listed := num_missing(holes, range(epoch, epoch + 1))):
            raise Violated(f"epoch {epoch} left out {left_out} samples, but the holes list {listed}")
    return total_left_out(lineage)


def sums(run: Evidence, reference: Evidence | None) -> str:
    """The sums over the samples actually read are the closed form's at every epoch's end, in commits and result."""
    shape, result = shape_of(run), result_of(run)
    left_out = whole(result, "num_left_out") if "num_left_out" in result else 0
    claimed = [Claim("the result", whole(result, "step"), part(result, "coverage"), holes_of(result), left_out)]
    claimed += [_claim(commit.key, commit.fields) for commit in run.commits if commit.fields is not None]
    epoch = closed_form(shape.rows)
    checked = sum(_check_sums(shape, epoch, claim) for claim in claimed)
    if isinstance(shape, MixedShape):
        check_sources(shape, result)
    if shape.is_at_epoch_end:
        return f"{shape.num_epochs} epochs of {shape.rows} samples; {checked} of {len(claimed)} sums at an epoch's end"
    if reference is None:
        where = f"the job ended inside epoch {shape.num_epochs - 1}"
        raise Unknown(f"{where}, and there is no run without faults to compare with")
    if differ(part(result_of(reference), "coverage"), result["coverage"]):
        raise Violated("the coverage sums differ from those of the run without faults")
    return "the job ended inside an epoch; its sums are those of the run without faults"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a result or a commit says of its samples up to a step: their sums, the holes, and how many those took."""

    whose: str
    step: int
    sums: Line
    holes: list[Hole]
    left_out: int


def _claim(key: str, fields: Line) -> Claim:
    account: Line = part(fields, "account") if "account" in fields else {"left_out": 0}
    return Claim(key, whole(fields, "step"), part(fields, "coverage"), holes_of(account), whole(account, "left_out"))


def _check_sums(shape: Shape, epoch: tuple[int, int], claim: Claim) -> bool:
    """Check one claim's count, and its sums if it stands at an epoch's end; return whether it did."""
    expected, count = shape.samples_before(claim.step), whole(claim.sums, "count")
    if count + claim.left_out != expected:
        counted = f"{count} samples counted up to step {claim.step} and {claim.left_out} left out"
        raise Violated(f"{claim.whose}: {counted}, it should be {expected} in all")
    if claim.step % shape.steps_per_epoch:
        return False
    times = claim.step // shape.steps_per_epoch
    if claim.left_out != (listed := num_missing(claim.holes, range(times))):
        raise Violated(f"{claim.whose}: {claim.left_out} samples left out, but its holes list {listed}")
    missing = [pair for hole in claim.holes for number in range(times) for pair in hole.missing(number)]
    absent = [sum_over(lo, hi) for lo, hi in missing]
    for place, name in enumerate(("sum_a", "sum_b")):
        if whole(claim.sums, name) != epoch[place] * times - sum(sums[place] for sums in absent) & _MASK:
            which = f"{times} epochs of {shape.rows} samples" + (" less the listed holes" if claim.holes else "")
            raise Violated(f"{claim.whose}: {name} after {which} is not the closed form's")
    return True


def closed_form(rows: int) -> tuple[int, int]:
    """Return the two coverage sums of one whole epoch, computed here from their definition, not taken over."""
    return sum_over(0, rows)


def sum_over(lo: int, hi: int) -> tuple[int, int]:
    """Return the two sums over the ids [lo, hi)."""
    sum_a = sum_b = 0
    salt_a, salt_b = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
    for first in range(lo, hi, _CHUNK):
        ids = np.arange(first, min(first + _CHUNK, hi), dtype=np.uint64)
        sum_a += int(_mix(ids + salt_a).sum(dtype=np.uint64))
        sum_b += int(_mix(_mix(ids ^ salt_b) + salt_b).sum(dtype=np.uint64))
    return sum_a & _MASK, sum_b & _MASK


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
