"""Damage a good recorded run as bugs in the product would; used by `chaos.planted.catalogue`.

Every function changes the files in one run's folder.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from chaos.judge.evidence.applied import (
    formed_at,
    furthest_of,
    restored_at,
    result_of,
    shape_of,
)
from chaos.judge.evidence.run_files import (
    Evidence,
    Line,
    collect,
    items,
    number,
    part,
    whole,
)
from chaos.planted.edits import Change, Damage, edit, edit_result, forge, history_of, in_result, later_term, rewrite

_HOURS_S = 36_000.0


def _edit_step(folder: Path, change: Change) -> None:
    """Change all ranks' lines of one step of the lineage in the last term."""
    run = collect(folder)
    last, chosen = later_term(run), _later_step(run)
    edit(folder, lambda line: change(line) if _is_step(line, last, chosen) else line)


def _in_step(change: Change) -> Damage:
    return lambda folder: _edit_step(folder, change)


def _later_step(run: Evidence) -> int:
    """Return a step of the last term that is neither its first nor an epoch's first."""
    first = whole(restored_at(run)[later_term(run)], "step") + 1
    return next(step for step in (first + 1, first + 2) if (step - 1) % shape_of(run).steps_per_epoch)


def _is_step(line: Line, term: int, step: int) -> bool:
    return line["op"] == "step" and line["term"] == term and line["step"] == step


def repeat(folder: Path) -> None:
    micro_batch = shape_of(collect(folder)).micro_batch
    _edit_step(folder, lambda line: {**line, "lo": whole(line, "lo") - micro_batch, "hi": whole(line, "lo")})


def fetched_cursor(folder: Path) -> None:
    run = collect(folder)
    last, shape = later_term(run), shape_of(run)

    def ahead(line: Line) -> Line:
        if line["op"] != "step" or line["term"] != last:
            return line
        step = whole(line, "step")  # the position of the next step
        lo = step % shape.steps_per_epoch * shape.micro_batch
        return {**line, "epoch": step // shape.steps_per_epoch, "lo": lo, "hi": lo + shape.micro_batch}

    edit(folder, ahead)


def dropped_tail(folder: Path) -> None:
    end = shape_of(collect(folder)).total_steps
    edit(folder, lambda line: None if line["op"] == "step" and line["step"] == end else line)


skip = _in_step(lambda _: None)
filtered_rows = _in_step(lambda line: {**line, "num_samples": whole(line, "num_samples") - 1})
unlisted_hole = _in_step(lambda line: {**line, "num_samples": whole(line, "num_samples") - 1, "num_left_out": 1})
different_losses = _in_step(lambda line: {**line, "loss": -1.5})
skipped_line = _in_step(lambda line: None if line["rank"] == 0 else line)


def other_hole(folder: Path) -> None:
    run = collect(folder)
    shape, coverage = shape_of(run), part(result_of(run), "coverage")
    hole = {"lo": 3, "hi": 5, "since": 0, "epoch": 0, "kept": []}
    left_out = 2 * shape.num_epochs
    edit_result(
        folder,
        holes=[hole],
        num_left_out=left_out,
        coverage={**coverage, "count": whole(coverage, "count") - left_out},
    )


def disagreement(folder: Path) -> None:
    seen: list[Line] = []

    def once(line: Line) -> Line:
        seen.append(line)
        return {**line, "loss": -1.5} if len(seen) == 1 else line

    _edit_step(folder, once)


def stale_lanes(folder: Path) -> None:
    def widened(line: Line) -> Line:
        lo, hi = items(line, "lanes")
        assert isinstance(lo, int) and isinstance(hi, int)
        return {**line, "lanes": [lo - 1, hi] if lo else [lo, hi]}

    _edit_step(folder, widened)


def idle_lane(folder: Path) -> None:
    num_lanes = shape_of(collect(folder)).num_lanes

    def narrowed(line: Line) -> Line:
        lo, hi = items(line, "lanes")
        return {**line, "lanes": [lo, num_lanes - 1]} if hi == num_lanes else line

    _edit_step(folder, narrowed)


def wrong_sum(folder: Path) -> None:
    coverage = part(collect(folder).result or {}, "coverage")
    edit_result(folder, coverage={**coverage, "sum_a": whole(coverage, "sum_a") ^ 1})


def miscounted_commit(folder: Path) -> None:
    def counting(record: Line) -> Line:
        coverage = part(record, "coverage")
        return {**record, "coverage": {**coverage, "count": whole(coverage, "count") + 1}}

    forge(folder, counting)


def _in_witness(*changes: tuple[int, int]) -> Damage:
    """Return the damage of samples that count more or less often, as (place, difference)."""

    def damage(folder: Path) -> None:
        weights = np.load(folder / "witness.npy")
        for sample, by in changes:
            weights[sample] += by
        np.save(folder / "witness.npy", weights)

    return damage


witness_repeat, witness_skip, witness_swap = _in_witness((0, 1)), _in_witness((-1, -1)), _in_witness((0, 1), (-1, -1))


def extra_step(folder: Path) -> None:
    run = collect(folder)
    last, newest = later_term(run), furthest_of(run)[later_term(run)]
    path = history_of(folder, f"{last:08d}-*")
    rewrite(path, lambda lines: [*lines, *({**x, "step": newest + 1} for x in lines if _is_step(x, last, newest))])


def other_weights(folder: Path) -> None:
    digest = "0" * 63 + "1"
    edit_result(folder, weights_sha256=digest)
    edit(folder, lambda line: {**line, "weights_sha256": digest} if line["op"] == "end" else line)


def other_commit(folder: Path) -> None:
    first = min(whole(line, "step") for line in collect(folder).of("commit"))

    def change(line: Line) -> Line:
        is_it = line["op"] == "commit" and line["step"] == first
        return {**line, "weights_sha256": "0" * 64} if is_it else line

    edit(folder, change)


other_metrics = in_result(metrics={"loss": 0.5, "samples": 17.0})


def one_ranks_weights(folder: Path) -> None:
    seen: list[Line] = []

    def once(line: Line) -> Line:
        if line["op"] != "end" or line["status"] != "done" or seen:
            return line
        seen.append(line)
        return {**line, "weights_sha256": "0" * 64}

    edit(folder, once)


def harmless_kill(folder: Path) -> None:
    run = collect(folder)
    fault = next(line for line in run.of("fault") if line.get("is_drawn") and str(line["kind"]).startswith("kill"))
    at = number(fault, "t")
    after = next(term for term, t in formed_at(run).items() if t > at)
    start = whole(restored_at(run)[after], "step")

    def unlucky(line: Line) -> Line | None:
        if line["op"] == "commit" and line["step"] == start and number(line, "t") > at:
            return {**line, "t": at}  # published by a survivor while leaving
        is_lost = line["op"] == "step" and whole(line, "term") < after and whole(line, "step") > start
        return None if is_lost else line

    edit(folder, unlucky)


def vain_fault(folder: Path) -> None:
    run = collect(folder)
    last = max(number(line, "t") for line in run.of("fault"))
    newest = max(formed_at(run))
    at = min(number(line, "t") for line in run.of("step") if line["term"] == newest)
    edit(folder, lambda line: {**line, "t": at} if line["op"] == "fault" and line["t"] == last else line)


def long_ago(folder: Path) -> None:
    first = min(number(line, "t") for line in collect(folder).of("fault"))
    edit(folder, lambda line: {**line, "t": first - _HOURS_S} if line["op"] == "fault" and line["t"] == first else line)


def standstill(folder: Path) -> None:
    steps = collect(folder).of("step")
    since = number(steps[-1], "t") - 0.01
    edit(folder, lambda line: {**line, "t": number(line, "t") + _HOURS_S} if number(line, "t") > since else line)


def unexplained_term(folder: Path) -> None:
    first = min(number(line, "t") for line in collect(folder).of("fault"))
    edit(folder, lambda line: None if line["op"] == "fault" and line["t"] == first else line)


def unexplained_death(folder: Path) -> None:
    edit(folder, lambda line: None if line["op"] == "end" and line["status"] == "done" else line)


def given_up(folder: Path) -> None:
    edit(folder, lambda line: {**line, "code": 93} if line["op"] == "exit" and line["node"] == 1 else line)


def unreadable(folder: Path) -> None:
    edit(folder, lambda line: {key: value for key, value in line.items() if key != "lanes"})
