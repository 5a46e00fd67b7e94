"""Checks of a mixture: every source counts as often as it was passed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from chaos.judge.evidence.applied import result_of, skipped_steps
from chaos.judge.evidence.holes import holes_of
from chaos.judge.evidence.run_files import Evidence, Line, items, whole
from chaos.judge.findings import Violated
from chaos.judge.job_shape import MixedShape


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
