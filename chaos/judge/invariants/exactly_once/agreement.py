"""Invariants between ranks: all agree on what was applied, and every lane has one owner in each step."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

from chaos.judge.evidence.applied import Steps, restored_at, result_of, shape_of, steps_of, validated_every
from chaos.judge.evidence.copies import parallel_of
from chaos.judge.evidence.holes import left_out_of
from chaos.judge.evidence.run_files import Evidence, Line, lanes_of, number, whole
from chaos.judge.findings import Violated
from chaos.judge.job_shape import Crews, MixedShape, cell_size

_UNWRITTEN_S = 0.25
"""Seconds that a line may wait for the writer thread on a busy machine."""
_THAWED_S = 2.0
"""Seconds until the executor's next look undoes what is due."""
_CLOCK_S = 1.0
"""Seconds that a process's clock may go back between two steps if no fault sets clocks."""
_CLOSED = "closed"
_SHARED = ("epoch", "lo", "hi", "num_samples", "world", "loss")


def agreement(run: Evidence) -> str:
    """All ranks of a term restore the same state, apply the same samples, skip no step, and end with equal weights."""
    restored = restored_at(run)
    for line in run.of("restore"):
        first = {"applied_by": line.get("applied_by"), **restored[whole(line, "term")]}
        _same({"applied_by": None, **line}, first, ("step", "epoch", "offset", "commit", "applied_by"), "restored")
    _check_places(run)
    sets_clocks = any(fault["kind"] == "jump_clock" for fault in run.of("fault"))
    for process in run.processes:
        _check_consecutive(process, restored)
        if not sets_clocks:
            _check_times(process)
    steps = steps_of(run)
    for lines in steps.values():
        for line in lines:
            _same(line, lines[0], _SHARED, f"applied step {line['step']}")
            if left_out_of(line) != left_out_of(lines[0]):
                raise Violated(
                    f"rank {line['rank']} of term {line['term']} left out other samples of step {line['step']}"
                )
    _check_ends(run)
    _check_validations(run)
    return f"{len(steps)} steps of {len(restored)} terms, all ranks agree on each"


def _check_ends(run: Evidence) -> None:
    """A rank ends with the result, in the last term, or with the commit of its step if there is one."""
    result = result_of(run)
    records = {(fields.get("term"), fields.get("step")): fields for each in run.commits if (fields := each.fields)}
    lines = {(line["term"], line["step"]): line for line in run.of("commit")}
    first = dict[tuple[object, object], Line]()
    for line in run.of("end"):
        term, place = whole(line, "term"), (line["term"], line["step"])
        if line["status"] == _CLOSED:
            continue  # not among those that finished; may hold an older state, or a shard
        if term == result["term"]:
            _same(line, result, ("status", "step", "weights_sha256", "coverage"), "ended")
        for other in (lines.get(place), records.get(place), first.setdefault(place, line)):
            _same(line, {**line, **(other or {})}, ("weights_sha256", "coverage"), "ended")
        steps = [whole(each, "step") for op in ("restore", "step") for each in run.in_term(op, term)]
        if whole(line, "step") not in steps:
            raise Violated(
                f"rank {line['rank']} of term {term} ended at step {line['step']}, which nobody applied there"
            )


def _check_validations(run: Evidence) -> None:
    """All surviving ranks of a term validate what one does, at steps at which a validation is due."""
    every = validated_every(run)
    validated: dict[int, set[int]] = {}
    own: dict[tuple[int, object], set[int]] = {}
    for line in run.of("validate"):
        term, step = whole(line, "term"), whole(line, "step")
        if every is not None and step % every and step not in (shape_of(run).total_steps, result_of(run)["step"]):
            raise Violated(f"term {term}: rank {line['rank']} validated step {step}, which is not due")
        validated.setdefault(term, set()).add(step)
        own.setdefault((term, line["rank"]), set()).add(step)
    for line in [*run.of("step"), *(end for end in run.of("end") if end["status"] == "done")]:
        term, before = whole(line, "term"), whole(line, "step") - (line["op"] == "step")
        if before in validated.get(term, ()) and before not in own.get((term, line["rank"]), ()):
            raise Violated(f"term {term}: rank {line['rank']} went on without the validation of step {before}")


def _check_places(run: Evidence) -> None:
    """Ranks agree on the world size; epoch, offset and count of a step are the job's."""
    shape, sizes = shape_of(run), dict[object, object]()
    for line in [*run.of("form"), *run.of("step")]:
        if "world" in line and sizes.setdefault(line["term"], line["world"]) != line["world"]:
            raise Violated(
                f"term {line['term']} has {sizes[line['term']]} ranks, rank {line['rank']} says {line['world']}"
            )
    for line in [] if isinstance(shape, MixedShape) else run.of("restore"):
        epoch, steps = divmod(whole(line, "step"), shape.steps_per_epoch)
        if (line["epoch"], line["offset"]) != (epoch, steps * shape.micro_batch):
            where = f"rank {line['rank']} of term {line['term']} restored step {line['step']}"
            raise Violated(f"{where} as epoch {line['epoch']}, offset {line['offset']}")
    for line in run.of("step"):
        epoch, steps = divmod(whole(line, "step") - 1, shape.steps_per_epoch)
        lo, hi = steps * shape.micro_batch, (steps + 1) * shape.micro_batch
        if (line["epoch"], line["lo"], line["hi"]) != (epoch, lo, hi):
            where = f"rank {line['rank']} of term {line['term']} applied step {line['step']}"
            due = f"epoch {epoch}, offsets [{lo}, {hi})"
            raise Violated(f"{where} as epoch {line['epoch']}, offsets [{line['lo']}, {line['hi']}), it is {due}")
    for line in run.of("commit"):
        if str(line["key"]) != f"commits/{line['term']:08d}-{line['step']:012d}.json":
            raise Violated(f"{line['key']} is recorded as a commit of term {line['term']}, step {line['step']}")


def _check_consecutive(process: list[Line], restored: dict[int, Line]) -> None:
    """A process first applies the step after its restore, then consecutive ones."""
    before: dict[int, int] = {}
    for line in process:
        if line["op"] == "step":
            term, step = whole(line, "term"), whole(line, "step")
            last = before.get(term, whole(restored[term], "step"))
            if step != last + 1:
                raise Violated(f"term {term}: rank {line['rank']} applied step {step} after step {last}")
            before[term] = step


def _check_times(process: list[Line]) -> None:
    """A process stamps its steps in the order in which it applies them."""
    steps = [line for line in process if line["op"] == "step"]
    for before, after in pairwise(steps):
        if number(after, "t") < number(before, "t") - _CLOCK_S:
            back_s = number(before, "t") - number(after, "t")
            where = f"term {after['term']}: rank {after['rank']}"
            raise Violated(f"{where} applied step {after['step']} {back_s:.1f} s before step {before['step']}")


def _same(line: Line, other: Line, keys: tuple[str, ...], what: str) -> None:
    for key in keys:
        if differ(line[key], other[key]):
            whose = f"rank {line['rank']} of term {line['term']}"
            raise Violated(f"{whose} {what} with {key} {line[key]}, another with {other[key]}")


def differ(value: object, other: object) -> bool:
    """Compare JSON values bit for bit: NaN equals itself, and 0.0 is not -0.0."""
    if type(value) is type(other):
        if isinstance(value, int | str):
            return value != other
        if isinstance(value, float):
            return repr(value) != repr(other)
    return value is not other and json.dumps(value, sort_keys=True) != json.dumps(other, sort_keys=True)


def partition(run: Evidence) -> str:
    """In every applied step, every lane belongs to one rank of the world, or to one compute group in cells."""
    steps, num_lanes = steps_of(run), shape_of(run).num_lanes
    last_term, ended_at = whole(result_of(run), "term"), dict[tuple[int, object], float]()
    for (term, _), lines in steps.items():
        for line in lines:  # each rank by its own clock
            ended_at[term, line["rank"]] = max(ended_at.get((term, line["rank"]), 0.0), number(line, "t"))
    crews = Crews.of(run.config)
    if crews.cell > 1:
        _check_cells(steps, crews)
    _check_owners(run, steps, num_lanes)
    in_places = ((key, lines, alike) for key, lines in steps.items() for alike in _by_number(lines, crews))
    for (term, step), lines, alike in in_places:
        if _tile(alike, num_lanes):
            continue
        owners = Counter(lane for line in alike for lane in lanes_of(line))
        wrong = [lane for lane in range(max([num_lanes, *owners]) + 1) if owners[lane] != (lane < num_lanes)]
        # A rank killed before its last lines were written leaves a hole only at its term's end.
        at = max(number(line, "t") for line in lines)
        own = all(number(line, "t") >= ended_at[term, line["rank"]] - _UNWRITTEN_S for line in lines)
        is_last = own or _is_unwritten_to_the_end(run, term, at, wrong)
        is_torn = is_last and term != last_term and all(owners[lane] == 0 for lane in wrong)
        if wrong and not is_torn:
            times = owners[wrong[0]]
            raise Violated(f"term {term}, step {step}: lane {wrong[0]} of {num_lanes} was computed {times} times")
    return f"{len(steps)} applied steps, {num_lanes} lanes, each lane once in each"


def _check_owners(run: Evidence, steps: Steps, num_lanes: int) -> None:
    """A rank's lanes stay the same in a world; undealt, rank r of W has [r * L // W, (r + 1) * L // W) of all L."""
    are_in_order = cell_size(run.config) == 1 and parallel_of(run).get("shards", "none") in ("none", "optimizer")
    first = dict[tuple[int, int], range]()
    for (term, step), lines in steps.items():
        for line in lines:
            rank, world, lanes = whole(line, "rank"), whole(line, "world"), lanes_of(line)
            lo, hi = (place * num_lanes // world for place in (rank, rank + 1))
            due = range(lo, hi) if are_in_order else first.setdefault((term, rank), lanes)
            if lanes != due:
                where = f"term {term}, step {step}: rank {rank} of {world}"
                raise Violated(f"{where} computed lanes {[*lanes]}, its lanes are {[*due]}")


def _check_cells(steps: Steps, crews: Crews) -> None:
    """Each rank of a cell is at its own place, and ranks of a compute group have the same lanes."""
    for (term, step), lines in steps.items():
        lanes: dict[int, Line] = {}
        for line in lines:
            rank = whole(line, "rank")
            place = rank % crews.cell
            first, where = lanes.setdefault(crews.crew_of(rank), line), f"term {term}, step {step}: rank {line['rank']}"
            if line.get("place") != place:
                raise Violated(f"{where} computed as place {line.get('place')} of its cell, it is place {place}")
            if lanes_of(line) != lanes_of(first):
                mine, others = ([*lanes_of(one)] for one in (line, first))
                raise Violated(f"{where} computed lanes {mine}, rank {first['rank']} of its cell {others}")


def _by_number(lines: list[Line], crews: Crews) -> list[list[Line]]:
    """Return a step's lines by rank within the compute group; all together if every rank has its own lanes."""
    if crews.size == 1:
        return [lines]
    found: list[list[Line]] = [[] for _ in range(crews.size)]
    for line in lines:
        found[crews.number_of(whole(line, "place"))].append(line)
    return found


def _is_unwritten_to_the_end(run: Evidence, term: int, at: float, lanes: list[int]) -> bool:
    """Return True if a file system was frozen then, and no later line of the term has one of these lanes.

    Histories are written in the background, so a process killed during the freeze loses all lines since.
    """
    frozen = [fault for fault in run.of("fault") if fault["kind"] == "freeze_fs"]
    if not any(number(f, "t") - _UNWRITTEN_S <= at <= number(f, "t") + number(f, "for_s") + _THAWED_S for f in frozen):
        return False
    later = (line for line in run.of("step") if line["term"] == term and number(line, "t") > at)
    return not any(lane in lanes_of(line) for line in later for lane in lanes)


def _tile(lines: list[Line], num_lanes: int) -> bool:
    """Return True if the ranks' non-empty ranges of lanes are contiguous from the first lane to the last."""
    ranges = sorted(map(lanes_of, lines), key=lambda lanes: lanes.start)
    if any(lanes.step != 1 for lanes in ranges):
        return False
    ends = [0, *(lanes.stop for lanes in ranges)]
    return ends[-1] == num_lanes and all(
        lanes.start == end < lanes.stop for lanes, end in zip(ranges, ends, strict=False)
    )
