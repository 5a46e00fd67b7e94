"""Invariant of the witness: its trained weights count every sample once an epoch."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from chaos.judge.evidence.applied import lineage_of, num_not_applied, result_of, shape_of, skipped_steps
from chaos.judge.evidence.copies import node_of
from chaos.judge.evidence.holes import holes_of, missing_times, total_left_out
from chaos.judge.evidence.run_files import Evidence, whole
from chaos.judge.findings import Unknown, Violated
from chaos.judge.invariants.exactly_once.samples import witness_of_sources
from chaos.judge.job_shape import MixedShape, cell_size, stage_size


def trains_witness(run: Evidence) -> bool:
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


def cells(run: Evidence) -> str:
    """No world lacks a stage of a cell, and no stage spans two nodes.

    Ranks of a stage communicate within every block, so they must be together; stages may be on different nodes.
    """
    size, per_stage, nodes = cell_size(run.config), stage_size(run.config), node_of(run)
    groups: dict[tuple[int, int], set[object]] = defaultdict(set)
    terms, num_spread = set[int](), 0
    for line in run.of("form"):
        term, world, rank = whole(line, "term"), whole(line, "world"), whole(line, "rank")
        terms.add(term)
        if world % size:
            raise Violated(f"term {term}: a world of {world} ranks is not of whole cells of {size}")
        if (node := nodes.get(line["pid"])) is not None:
            groups[term, rank // per_stage].add(node)
    for (term, number), found in groups.items():
        cell, stage = divmod(number, size // per_stage)
        if len(found) > 1:
            on = " and ".join(sorted(map(str, found)))
            raise Violated(f"term {term}: stage {stage} of cell {cell} is on the nodes {on}")
        others = groups.get((term, number - 1), found) if stage else found
        num_spread += others != found
    return f"{len(terms)} worlds of whole cells of {size}; {num_spread} borders between stages were between nodes"
