"""Invariants of what was applied: every rank agrees, every lane has one owner, every sample counts once an epoch.

Exactly once is shown four ways that share nothing but the result: intervals of the lineage, the row counts of what was
read, the mixed sums against their closed form, and the witness's weights.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chaos.judge.evidence.applied import (
    Applied,
    counts_of,
    first_miscount,
    lineage_of,
    restored_at,
    result_of,
    shape_of,
    steps_of,
)
from chaos.judge.evidence.holes import (
    Hole,
    coverage_counts,
    holes_of,
    left_out_of,
    missing_times,
    num_missing,
    total_left_out,
)
from chaos.judge.evidence.run_files import (
    Evidence,
    Line,
    lanes_of,
    number,
    part,
    whole,
)
from chaos.judge.evidence.skipped_steps import num_not_applied, skipped_steps
from chaos.judge.findings import Unknown, Violated
from chaos.judge.job_shape import MixedShape, Shape
from chaos.judge.mixed_sources import check_sources, witness_of_sources

_MASK = (1 << 64) - 1
_CHUNK = 1 << 20
_UNWRITTEN_S = 0.25
"""How long a line may wait for the thread that writes it, on a machine that is busy."""
_THAWED_S = 2.0
"""What is due to be undone is undone at the executor's next look."""
_SHARED = ("epoch", "lo", "hi", "num_samples", "world", "loss")


def agreement(run: Evidence) -> str:
    """All ranks of a term restore the same state, apply the same samples, skip no step, and end with equal weights."""
    restored = restored_at(run)
    for line in run.of("restore"):
        first = {"applied_by": line.get("applied_by"), **restored[whole(line, "term")]}
        _same({"applied_by": None, **line}, first, ("step", "epoch", "offset", "commit", "applied_by"), "restored")
    for process in run.processes:
        _check_consecutive(process, restored)
    steps = steps_of(run)
    for lines in steps.values():
        for line in lines:
            _same(line, lines[0], _SHARED, f"applied step {line['step']}")
            if left_out_of(line) != left_out_of(lines[0]):
                raise Violated(
                    f"rank {line['rank']} of term {line['term']} left out other samples of step {line['step']}"
                )
    result = result_of(run)
    for line in run.of("end"):
        if line["term"] == result["term"]:
            _same(line, result, ("step", "weights_sha256", "coverage"), "ended")
    return f"{len(steps)} steps of {len(restored)} terms, all ranks agree on each"


def _check_consecutive(process: list[Line], restored: dict[int, Line]) -> None:
    """A process applies the step after its restore first, and then one after another."""
    before: dict[int, int] = {}
    for line in process:
        if line["op"] == "step":
            term, step = whole(line, "term"), whole(line, "step")
            last = before.get(term, whole(restored[term], "step"))
            if step != last + 1:
                raise Violated(f"term {term}: rank {line['rank']} applied step {step} after step {last}")
            before[term] = step


def _same(line: Line, other: Line, keys: tuple[str, ...], what: str) -> None:
    for key in keys:
        if _differ(line[key], other[key]):
            whose = f"rank {line['rank']} of term {line['term']}"
            raise Violated(f"{whose} {what} with {key} {line[key]}, another with {other[key]}")


def _differ(value: object, other: object) -> bool:
    """Compare what JSON can say; NaN equals itself, and 0.0 is not -0.0: the bits count."""
    if type(value) is type(other):
        if isinstance(value, int | str):
            return value != other
        if isinstance(value, float):
            return repr(value) != repr(other)
    return value is not other and json.dumps(value, sort_keys=True) != json.dumps(other, sort_keys=True)


def partition(run: Evidence) -> str:
    """In every applied step, every lane belongs to exactly one rank of the world; in cells, to one of each place."""
    steps, num_lanes = steps_of(run), shape_of(run).num_lanes
    last_term, ended_at = whole(result_of(run), "term"), dict[int, float]()
    for (term, _), lines in steps.items():
        ended_at[term] = max(ended_at.get(term, 0.0), *(number(line, "t") for line in lines))
    in_places = ((key, lines, alike) for key, lines in steps.items() for alike in _by_place(run, lines))
    for (term, step), lines, alike in in_places:
        if _tile(alike, num_lanes):
            continue
        owners = Counter(lane for line in alike for lane in lanes_of(line))
        wrong = [lane for lane in range(max([num_lanes, *owners]) + 1) if owners[lane] != (lane < num_lanes)]
        # A rank that was killed before its last lines were written leaves a hole at its term's end only.
        at = max(number(line, "t") for line in lines)
        is_last = at >= ended_at[term] - _UNWRITTEN_S or _is_unwritten_to_the_end(run, term, at, wrong)
        is_torn = is_last and term != last_term and all(owners[lane] == 0 for lane in wrong)
        if wrong and not is_torn:
            times = owners[wrong[0]]
            raise Violated(f"term {term}, step {step}: lane {wrong[0]} of {num_lanes} was computed {times} times")
    return f"{len(steps)} applied steps, {num_lanes} lanes, each lane once in each"


def _by_place(run: Evidence, lines: list[Line]) -> list[list[Line]]:
    """Return a step's lines by their ranks' places in cells; all together where every rank is a replica."""
    parallel = run.config.get("parallel")
    size = parallel.get("tensor", 1) if isinstance(parallel, dict) else 1
    if size == 1:
        return [lines]
    return [[line for line in lines if line.get("place") == place] for place in range(size)]


def _is_unwritten_to_the_end(run: Evidence, term: int, at: float, lanes: list[int]) -> bool:
    """Say whether a file system was frozen then, and no later line of the term has one of these lanes.

    Histories are written beside training, so a process that is killed meanwhile leaves none of its lines since.
    """
    frozen = [fault for fault in run.of("fault") if fault["kind"] == "freeze_fs"]
    if not any(number(f, "t") - _UNWRITTEN_S <= at <= number(f, "t") + number(f, "for_s") + _THAWED_S for f in frozen):
        return False
    later = (line for line in run.of("step") if line["term"] == term and number(line, "t") > at)
    return not any(lane in lanes_of(line) for line in later for lane in lanes)


def _tile(lines: list[Line], num_lanes: int) -> bool:
    """Say whether the ranks' ranges of lanes, none empty, follow one another from the first lane to the last."""
    ranges = sorted(map(lanes_of, lines), key=lambda lanes: lanes.start)
    if any(lanes.step != 1 for lanes in ranges):
        return False
    ends = [0, *(lanes.stop for lanes in ranges)]
    return ends[-1] == num_lanes and all(
        lanes.start == end < lanes.stop for lanes, end in zip(ranges, ends, strict=False)
    )


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
    if _differ(part(result_of(reference), "coverage"), result["coverage"]):
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


def trains_witness(run: Evidence) -> bool:
    """Say whether the job's configuration trains the witness."""
    task = run.config.get("task")
    return isinstance(task, dict) and str(task.get("path")).endswith(":Witness")


def witness(run: Evidence) -> str:
    """The trained weights of the witness count every sample once an epoch."""
    if run.witness is None:
        raise Unknown("the witness was trained, but its counts are missing")
    shape = shape_of(run)
    if run.witness.size != shape.rows:
        raise Violated(f"the witness has {run.witness.size} weights, the manifest {shape.rows} rows")
    most, least = shape.num_epochs, shape.total_steps // shape.steps_per_epoch
    holes = holes_of(result_of(run))
    if isinstance(shape, MixedShape):
        return witness_of_sources(run, shape, run.witness)
    counts = run.witness + missing_times(holes, shape.finished_epochs, shape.rows)
    in_last = missing_times(holes, range(least, most), shape.rows)
    num_skipped = len(skipped_steps(result_of(run)))  # each holds a sample at most once
    wrong = np.flatnonzero((counts < least - num_skipped) | (counts + in_last > most))
    if wrong.size:
        sample = int(wrong[0])
        times = f"{int(run.witness[sample])} times in {most} epochs"
        raise Violated(f"sample {sample} was applied {times}; {wrong.size} of {run.witness.size} samples are wrong")
    left_out = (total_left_out(lineage_of(run)) if holes else 0) + num_not_applied(run)
    total, expected = int(run.witness.sum()), shape.samples_before(shape.total_steps)
    if total + left_out != expected:
        raise Violated(f"the witness counted {total} samples in all and {left_out} were left out of {expected}")
    if num_skipped:
        return f"{total} samples, and those of {num_skipped} steps without an update"
    if holes:
        return f"{run.witness.size} weights, each as often as the {len(holes)} listed holes leave"
    return f"{run.witness.size} weights, each exactly {most}" if most == least else f"{total} samples, none twice"


def same_weights(run: Evidence, reference: Evidence) -> str:
    """The final weights have the bits of the run without faults."""
    _check_reference(run, reference)
    ours, theirs = result_of(run)["weights_sha256"], result_of(reference)["weights_sha256"]
    if ours != theirs:
        raise Violated(f"the weights' SHA-256 is {str(ours)[:16]}, without faults it is {str(theirs)[:16]}")
    return f"sha256 {str(ours)[:16]} in both runs"


def same_weights_at_commits(run: Evidence, reference: Evidence) -> str:
    """Every commit has the weights that the run without faults had at its step, wherever both made one.

    Where samples, or updates, were left out, a branch that was given up may have left out others: then only the
    lineage's commits are compared.
    """
    _check_reference(run, reference)
    is_partial = bool(holes_of(result_of(run))) or run.has("nonfinite")
    lineage = {(applied.term, applied.step) for applied in lineage_of(run)} if is_partial else None
    expected = {step: weights for _, step, weights in _committed_weights(reference)}
    compared = set[tuple[int, int]]()
    for term, step, weights in _committed_weights(run):
        if step not in expected or (lineage is not None and (term, step) not in lineage):
            continue
        compared.add((term, step))
        if weights != expected[step]:
            where = f"the commit of step {step} (term {term})"
            raise Violated(f"{where} has weights of SHA-256 {weights[:16]}, without faults {expected[step][:16]}")
    if not compared:
        raise Unknown("the two runs have no commit of the same step")
    return f"{len(compared)} commits, the same weights in both runs"


def _committed_weights(run: Evidence) -> list[tuple[int, int, str]]:
    """Return term, step and the weights' hash of every commit: as histories say, and the records that are left."""
    lines = [*run.of("commit"), *(commit.fields for commit in run.commits if commit.fields is not None)]
    known = [line for line in lines if line.get("weights_sha256")]
    return sorted((whole(line, "term"), whole(line, "step"), str(line["weights_sha256"])) for line in known)


def same_metrics(run: Evidence, reference: Evidence) -> str:
    """The last validation gave the same numbers as in the run without faults."""
    _check_reference(run, reference)
    ours, theirs = result_of(run)["metrics"], result_of(reference)["metrics"]
    if _differ(ours, theirs):
        raise Violated(f"validation gave {ours}, without faults {theirs}")
    return "validation metrics equal in both runs"


def same_losses(run: Evidence, reference: Evidence) -> str:
    """Every step of the lineage had the loss that it has without faults."""
    _check_reference(run, reference)
    expected = {whole(line, "step"): line["loss"] for line in reference.of("step")}
    for applied in lineage_of(run):
        loss = applied.lines[0]["loss"]
        if _differ(loss, expected[applied.step]):
            where = f"step {applied.step} (term {applied.term})"
            raise Violated(f"{where} had loss {loss}, without faults {expected[applied.step]}")
    return f"{len(expected)} steps, the same loss in both runs"


def _check_reference(run: Evidence, reference: Evidence) -> None:
    if reference.of("fault"):
        raise Unknown("the reference had faults itself")
    told = ("pid", "started_at", "host", "boot", "born")
    pids = [{tuple(line.get(key) for key in told) for line in evidence.of("form")} for evidence in (run, reference)]
    if not pids[1]:
        raise Unknown("the reference has no history of its own")
    if pids[0] & pids[1]:
        raise Unknown("the reference is a copy of the run itself, not another run")


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
