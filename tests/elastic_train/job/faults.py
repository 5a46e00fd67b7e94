"""Faults at any point of a step, for ranks of a small job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from elastic_train.errors import PeerLostError
from elastic_train.job import gradient_norm
from elastic_train.job.state import AppliedState
from elastic_train.parallel.group import Group
from tests.elastic_train.job.sharded.shard_jobs import facts_of
from tests.memory_machine import die


@dataclass(frozen=True)
class Fault:
    """At `step` the `dying` ranks leave at a point; `missing` survivors lack the norm, and `unable` ones a gradient
    part.

    Points: `computing`, before the exchange; `summed`, after it and before the ranks meet; `applied`, after the update.
    """

    step: int
    point: str
    dying: Sequence[int]
    missing: Sequence[int] = ()
    unable: Sequence[int] = ()


def step_with(
    fault: Fault, who: int, group: Group, state: AppliedState, term: int, compute: Callable[[], Tensor]
) -> None:
    """Compute the step in which a world ends, up to the point that this member reaches."""
    if fault.point == "computing" and who in fault.dying:
        die()
    try:
        measured = compute()
    except PeerLostError:
        return
    if fault.point == "summed" and who in fault.dying:
        die()
    if who in fault.unable:
        return
    try:
        norm = gradient_norm.norm_of(group.all_gather(measured), state.shards.table)
    except PeerLostError:
        state.hold(facts_of(state, term), measured)
        return
    if who in fault.missing:
        state.hold(facts_of(state, term), measured)
        return
    state.apply(facts_of(state, term), norm)
    if who in fault.dying:
        die()
