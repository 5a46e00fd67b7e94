"""One step's sums: run this replica's lanes, exchange the results with all ranks, and leave the step's mean gradient.

`run_lanes` is the interface to the code that turns lanes into a gradient (`turns`). The applied state does not change
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from elastic_train.config.combinations import refused
from elastic_train.core.arrays import Int64s, ranges_of
from elastic_train.core.coverage import CoverageSums
from elastic_train.core.mixture.account import sums_of_sources
from elastic_train.core.mixture.dealing import Mixture, RunOrder
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.errors import PeerLostError
from elastic_train.job import gradient_norm
from elastic_train.job.auditing.auditor import WrongGradient
from elastic_train.parallel.group import Group
from elastic_train.parallel.step_tables import Row, StepTables, gather_tables
from elastic_train.system.failpoints import reach
from elastic_train.training.session import Session
from elastic_train.training.step_sums import (
    ABLE,
    BUFFERS,
    BUSY,
    COMMIT,
    GIVE_UP,
    GROW,
    LEAVE,
    STOP,
    UNABLE,
    UNREADABLE,
    LaneSums,
    StepSums,
    fold,
)
from elastic_train.training.turns import run_turns


@dataclass(frozen=True, slots=True)
class Computed:
    """A step ready to be applied, unless it is unreadable or wrong; `flags` are this rank's own."""

    sums: StepSums
    flags: int
    buffers: Sequence[tuple[Tensor, Tensor]]
    wrong: Sequence[WrongGradient] = ()
    """Findings of audits, equal on all ranks."""


def compute_step(session: Session, lanes: Sequence[LaneBatch]) -> Computed:
    """Run forward and backward of this replica's lanes and leave the whole step's mean gradient in the parameters.

    If a rank cannot read a sample, all ranks learn of it together, and the gradient stays unfinished. If a forward pass
    has changed a buffer for the first time, all ranks run their lanes again, with the buffers in the sum.
    """
    if session.plan.config.run.forensic and session.world.mesh.speaks:
        _keep_ids(session, lanes)
    if session.auditor is not None:
        session.auditor.begin()
    while True:
        results = run_lanes(session, lanes)
        # As late as possible: a request to leave or join during a long step need not wait for the next one.
        flags = _flags(session, lanes)
        reach("reduce")
        sums = fold(_gather(session, lanes, results, flags))
        session.clock.mark("wait")
        if not sums.any_flags & BUFFERS or sums.is_unreadable:
            break
        session.buffers.track()
    if sums.is_unreadable:
        return Computed(sums, flags, ())
    buffers = _exchange(session, sums)
    return Computed(sums, flags, buffers, () if session.auditor is None else session.auditor.compare(session.holes))


def _exchange(session: Session, sums: StepSums) -> Sequence[tuple[Tensor, Tensor]]:
    """Finish the sums over all replicas; return the buffers' new values."""
    reach("exchange")
    session.gradients.finish(sums.divisor)
    buffers = session.buffers.finish(sums.buffers)
    session.clock.mark("exchange")
    return buffers


def meet(session: Session, measured: Tensor) -> tuple[Tensor | None, PeerLostError | None]:
    """Return the norm of the step's gradient once every rank holds the gradient: the point of no return.

    No rank applies a step before it knows that all others can. So if a lost rank has applied it, the others will, too:
    if a peer is lost here, its error is returned with the norm, and this rank leaves the world after applying the step.
    The norm is None if only peers know the rest of it: the next world decides (`job.resharding`). Raises PeerLostError
    in restart mode, whose next world starts from a commit, and WeightsDifferError if ranks measured different values
    for the same gradient.
    """
    table = session.state.shards.table
    try:
        gathered = session.world.group.all_gather(measured)
    except PeerLostError as error:
        if not session.worlds.is_live:
            raise
        return gradient_norm.known_alone(table, measured), error
    return gradient_norm.norm_of(gathered, table), None


def run_lanes(session: Session, lanes: Sequence[LaneBatch]) -> dict[int, LaneSums]:
    """Add the gradients and buffers of this replica's lanes to the step's sums; return each lane's results.

    If one rank of the cell cannot read a sample, none of its ranks trains: the step will not be applied, but they still
    take part in its exchanges.
    """
    if session.world.cell is not None and not _is_readable(session.world.cell, lanes):
        lanes = [replace(batch, tensors=None) for batch in lanes]
    session.gradients.begin()
    session.buffers.begin()
    results = run_turns(session, lanes)
    session.buffers.restore()
    return _add_parts(session, results)


def _add_parts(session: Session, results: dict[int, LaneSums]) -> dict[int, LaneSums]:
    """Return the lanes' results, summed over the context-parallel ranks."""
    if session.world.mesh.cell.context == 1:
        return results
    if session.buffers.has_changed:
        raise refused("buffers that change", "a model whose forward pass changes a buffer")
    session.clock.mark("rest")
    added = session.stage.add_up({lane: (one.loss, one.weight) for lane, one in results.items()})
    session.clock.mark("wait")
    return {lane: replace(one, loss=added[lane][0], weight=added[lane][1]) for lane, one in results.items()}


def _is_readable(cell: Group, lanes: Sequence[LaneBatch]) -> bool:
    """Return True if all ranks of a cell have all samples of its lanes; equal on all of them."""
    return not bool(cell.all_gather(torch.tensor(int(any(batch.unreadable for batch in lanes)))).any())


def _flags(session: Session, lanes: Sequence[LaneBatch]) -> int:
    """Return this rank's requests to the others, sent with the step."""
    flags = LEAVE * session.leave.is_set + GROW * session.worlds.wants_to_grow() + BUSY * session.commits.is_busy
    flags += COMMIT * session.commits.is_overdue() + GIVE_UP * session.commits.is_hopeless()
    flags += BUFFERS * (session.buffers.has_changed and not session.buffers.is_tracking)
    flags += UNABLE * session.commits.is_unable() + ABLE * session.commits.is_confirming_writable
    flags += STOP * (session.watch is not None and session.watch.wants_to_stop)
    return flags + UNREADABLE * any(batch.unreadable for batch in lanes)


def _gather(session: Session, lanes: Sequence[LaneBatch], results: dict[int, LaneSums], flags: int) -> StepTables:
    rows: dict[int, Row] = {}
    for batch in lanes:
        lane, has_samples = results[batch.lane], int(batch.tensors is not None)
        rows[batch.lane] = [lane.loss, lane.weight, batch.num_left_out, batch.num_truncated, has_samples, lane.buffers]
    spoken_for = lanes if session.world.mesh.speaks else ()  # all ranks of a cell have read the same samples
    coverage = _coverage_of(spoken_for)
    rank = [coverage.count, coverage.sum_a, coverage.sum_b, flags, *session.clock.row()]
    for sums in _sums_of_sources(session.plan.order, spoken_for):
        rank += [sums.count, sums.sum_a, sums.sum_b]
    return gather_tables(session.world.group, session.world.mesh, session.assigned, rows, rank)


def _keep_ids(session: Session, lanes: Sequence[LaneBatch]) -> None:
    """Write the samples that this rank reads for the next step to the history."""
    ids = ranges_of(_ids_of(lanes))
    state, world = session.state, session.world
    world.history.read(step=state.step + 1, epoch=state.reached.cursor.epoch, ids=ids, world=world.group.size)


def _coverage_of(lanes: Sequence[LaneBatch]) -> CoverageSums:
    """Return the coverage of this rank's lanes, in one call: a call costs as much as many ids."""
    return CoverageSums.of_ids(_ids_of(lanes))


def _sums_of_sources(order: RunOrder, lanes: Sequence[LaneBatch]) -> Sequence[CoverageSums]:
    """Return the coverage of this rank's lanes by source of a mixture; empty for a single training set."""
    if not isinstance(order, Mixture):
        return ()
    return sums_of_sources(_ids_of(lanes), order.first_id)


def _ids_of(lanes: Sequence[LaneBatch]) -> Int64s:
    return np.concatenate([batch.ids for batch in lanes]) if lanes else np.empty(0, dtype=np.int64)
