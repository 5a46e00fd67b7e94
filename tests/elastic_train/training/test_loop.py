"""A step of the loop: a rank's flags reach the others in the step that it has just computed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import torch
from torch import nn

from elastic_train.checkpoint.commits.record import Improvement
from elastic_train.config.recipe import EarlyStoppingConfig, ValidationConfig
from elastic_train.core.accounting import CoverageSums
from elastic_train.core.mesh import Mesh
from elastic_train.core.order import Cursor
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.errors import PeerLostError
from elastic_train.insight.phases import StepClock
from elastic_train.job.cells.stage import Stage
from elastic_train.job.state import TrainProgress
from elastic_train.system.preemption import LeaveRequest, StepDropped
from elastic_train.training import evaluation, loop, step
from elastic_train.training.session import Session
from elastic_train.training.step_sums import LEAVE, LaneSums, StepSums, StepTables


def test_a_rank_asked_to_leave_during_a_step_leaves_right_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not compute the following step: one step may take all the time that a machine has to leave."""
    session = MagicMock()
    session.stage, session.assigned, session.auditor, session.world.cell = (
        Stage(MagicMock(), nn.Module()),
        [[0]],
        None,
        None,
    )
    session.world.mesh = Mesh(0, 1)
    session.leave.is_set = session.commits.is_busy = False
    session.plan.config.run.forensic = False
    commits = session.commits
    for asked in (session.worlds.wants_to_grow, commits.is_overdue, commits.is_hopeless, commits.is_unable):
        asked.return_value = False
    commits.is_confirming_writable = False
    session.buffers.has_changed, session.clock, session.watch = False, StepClock(), None

    def forward(*_: object) -> step.ForwardOutput:
        session.leave.is_set = True
        return step.ForwardOutput(None, LaneSums(1.0, 1.0))

    monkeypatch.setattr(step, "_forward", forward)
    monkeypatch.setattr(step, "_coverage_of", lambda lanes: CoverageSums())
    monkeypatch.setattr(step, "gather_tables", lambda _, __, ___, lanes, rank: StepTables(list(lanes.values()), [rank]))
    batch = SimpleNamespace(lane=0, num_left_out=0, num_truncated=0, unreadable=None, tensors={})
    computed = step.compute_step(session, [batch])  # type: ignore[list-item]
    assert computed.flags == computed.sums.any_flags == LEAVE
    assert loop._end(session, computed.flags, computed.sums) is loop.Outcome.PREEMPTED


@pytest.mark.parametrize("others_lack_it", [False, True])
def test_ranks_of_a_cell_leave_a_step_out_together(monkeypatch: pytest.MonkeyPatch, others_lack_it: bool) -> None:
    """If one of them cannot read a sample, the others would wait for its contribution to the lane for ever."""
    session, run = MagicMock(stage=Stage(MagicMock(), nn.Module()), assigned=[[0]]), list[LaneBatch]()
    session.world.mesh, session.plan.num_lanes = Mesh(0, 1), 1
    session.world.cell.all_gather = lambda mine: torch.stack([mine, torch.tensor(int(others_lack_it))])

    def forward(_: object, batch: LaneBatch, *rest: object) -> step.ForwardOutput:
        run.append(batch)
        return step.ForwardOutput(None)

    monkeypatch.setattr(step, "_forward", forward)
    step.run_lanes(session, [LaneBatch(0, 0, 0, 2, np.arange(2), {})])
    assert len(run) == (0 if others_lack_it else 1)
    assert session.gradients.turn.call_args_list == [call(0, 0)], "others of its column wait for its leaf"


def test_losses_that_are_read_late_are_those_of_their_lanes() -> None:
    """This holds for any loss type, and for tasks whose loss has a dimension of one element."""
    unread = {
        4: step.Unread(torch.tensor(1.5, dtype=torch.bfloat16), 2.0, 7),
        5: LaneSums(),
        6: step.Unread(torch.tensor([0.1]), 3.0, 0),
        7: step.Unread(torch.tensor(-math.inf), 1.0, 0),
    }
    tenth = float(torch.tensor(0.1))
    assert step._read(unread) == {
        4: LaneSums(1.5, 2.0, 7),
        5: LaneSums(),
        6: LaneSums(tenth, 3.0, 0),
        7: LaneSums(-math.inf, 1.0, 0),
    }
    assert math.isnan(step._read({1: step.Unread(torch.tensor(math.nan), 1.0, 0)})[1].loss)
    assert step._read({}) == {}


@pytest.mark.parametrize(
    ("looks", "end"),
    [
        ([[1, 0, 0], [1, 1, 0], [1, 1, 1]], loop.Outcome.PREEMPTED),
        ([[1, 0, 0], [1, 1, 0], [1, 1, 0]], loop.Outcome.LEFT),
        ([[0, 0, 1], [0, 0, 1]], loop.Outcome.REGROUP),
    ],
)
@pytest.mark.parametrize("is_before", [True, False])
def test_ranks_that_are_asked_to_leave_one_after_another_leave_together(
    monkeypatch: pytest.MonkeyPatch, looks: list[list[int]], end: loop.Outcome, is_before: bool
) -> None:
    """Before a world's first step and after any, nobody leaves while others are still being asked."""
    monkeypatch.setattr(loop, "LEAVING_QUIET_S", 0.0)
    session = MagicMock(is_over=False)
    session.world.group.rank = 0
    session.leaving.side_effect = [*looks[: 1 if is_before else 0], *looks]
    session.state.shards.table.would_lose_state.return_value = False
    sums = StepSums(0.0, 1.0, CoverageSums(), 0, 0, LEAVE)
    assert (loop._end_before(session) if is_before else loop._end(session, 0, sums)) is end
    assert session.commits.finish.called == (end is loop.Outcome.PREEMPTED)


@pytest.mark.parametrize(("asked", "end"), [([1, 0], loop.Outcome.LEFT), ([0, 1], loop.Outcome.REGROUP)])
@pytest.mark.parametrize(("step", "is_sole"), [(3, True), (3, False), (0, True)])
def test_what_only_those_that_leave_have_is_committed_before_they_go(
    monkeypatch: pytest.MonkeyPatch, asked: list[int], end: loop.Outcome, step: int, is_sole: bool
) -> None:
    """All ranks commit, including those that stay; a job without a step has nothing to keep."""
    monkeypatch.setattr(loop, "LEAVING_QUIET_S", 0.0)
    session = MagicMock(is_over=False)
    session.world.group.rank, session.state.step = 0, step
    session.leaving.return_value = asked
    session.state.shards.table.would_lose_state.side_effect = lambda leaving: is_sole and leaving == asked
    assert loop._departure(session) is end
    assert session.commits.finish.called == (is_sole and step > 0)


def test_a_world_of_which_everybody_is_asked_one_after_another_looks_only_so_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler that asks slowly must not delay the first ranks until they are killed."""
    monkeypatch.setattr(loop, "LEAVING_QUIET_S", 0.0)
    session = MagicMock()
    session.world.group.rank = 0
    session.leaving.side_effect = [[place <= asked for place in range(99)] for asked in range(99)]
    assert loop._departure(session) is loop.Outcome.LEFT
    assert session.leaving.call_count == loop.MOST_LOOKS + 1


@pytest.mark.parametrize("others_lack_it", [True, False])
@pytest.mark.parametrize("has_it", [True, False])
def test_a_validation_that_a_fault_has_kept_a_rank_from_is_done_before_the_next_step(
    has_it: bool, others_lack_it: bool
) -> None:
    """If any rank lacks it, all ranks repeat it, since it decides when training ends. It counts once."""
    plan, state, world = MagicMock(), MagicMock(step=6), MagicMock()
    plan.config.validation = ValidationConfig(every="3 steps", early_stopping=EarlyStoppingConfig())
    plan.validates_every = 3
    state.reached = TrainProgress(step=6, improvement=Improvement("min loss", 1.0, 3, 6 if has_it else 3, int(has_it)))
    world.group.all_gather = lambda mine: torch.stack([mine, torch.tensor(int(not others_lack_it))])
    session = Session(plan, world, state, *[MagicMock()] * 8, None)
    assert session.is_validation_missed() == (others_lack_it or not has_it)
    evaluation._note(session, {"loss": 2.0})
    assert state.reached.improvement == Improvement("min loss", 1.0, 3, 6, 1)
    state.step = 7
    assert not session.is_validation_missed(), "none is due"


@pytest.mark.parametrize("has_it", [True, False])
def test_ranks_of_which_one_knows_that_training_has_ended_ask_each_other_the_same_before_the_first_step(
    has_it: bool,
) -> None:
    """A fault may have kept the other from the validation that ended it: each would take an answer for another one."""
    plan, state, world, leave = MagicMock(total_steps=9), MagicMock(step=6), MagicMock(), MagicMock(is_set=False)
    plan.config.validation = ValidationConfig(every="3 steps", early_stopping=EarlyStoppingConfig(patience=1))
    plan.validates_every, asked = 3, list[int]()
    state.reached = TrainProgress(step=6, improvement=Improvement("min loss", 1.0, 3, 6 if has_it else 3, int(has_it)))

    def gathered(mine: torch.Tensor) -> torch.Tensor:
        asked.append(int(mine))
        return torch.stack([mine, torch.tensor(int(not has_it and len(asked) == 1))])

    world.group.all_gather = gathered
    session = Session(plan, world, state, *[MagicMock()] * 4, leave, *[MagicMock()] * 3, None)
    assert session.is_over == has_it
    assert loop._end_before(session) is None
    assert asked == [int(has_it), 0]


@pytest.mark.parametrize(("is_best", "is_committed", "commits"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_a_best_state_that_a_fault_has_kept_from_being_committed_is(
    monkeypatch: pytest.MonkeyPatch, is_best: bool, is_committed: bool, commits: int
) -> None:
    session, validate = MagicMock(is_over=False, is_best=is_best), MagicMock()
    monkeypatch.setattr(loop, "validate", validate)
    session.is_validation_missed.return_value = False
    session.commits.has_head_at.return_value = is_committed
    loop._catch_up(session)
    assert session.commits.begin.call_count == commits and not validate.called


@pytest.mark.parametrize("is_at_entry", [True, False])
def test_a_late_leave_never_leaves_averages_in_place_of_the_weights(
    monkeypatch: pytest.MonkeyPatch, is_at_entry: bool
) -> None:
    """The state is committed next: the exchange of the weights is completed first, whenever the alarm comes."""
    leave, model = LeaveRequest(30.0), {"weights": "its own"}

    @contextlib.contextmanager
    def averaged(_: object) -> Iterator[None]:
        if is_at_entry:
            leave._be_late(14, None)
        model["weights"] = "averages"
        try:
            yield
        finally:
            if not is_at_entry:
                leave._be_late(14, None)
            model["weights"] = "its own"

    session = MagicMock(leave=leave)
    session.buffers.untouched = contextlib.nullcontext
    session.plan.config.validation.weights, session.state.shards.share.averaged = "ema", averaged
    monkeypatch.setattr(evaluation, "evaluate", lambda *_: {})
    monkeypatch.setattr(evaluation, "_note", lambda *_: None)
    try:
        with pytest.raises(StepDropped) if is_at_entry else contextlib.nullcontext():
            loop._catch_up(session)
    finally:
        leave.release()
    assert leave.is_late and model == {"weights": "its own"}


def test_a_rank_that_loses_a_peer_at_the_point_of_no_return_is_to_apply_its_step() -> None:
    """The peer may have applied the step. In restart mode no member's state counts, so the world just ends."""
    lost = PeerLostError("connection reset by peer")
    session, norm = MagicMock(), torch.tensor(1.0)
    session.state.shards.table.has_all_gradients = True
    session.world.group.all_gather.return_value = torch.ones(2, 1)
    assert step.meet(session, norm) == (norm, None)
    session.world.group.all_gather.side_effect = lost
    session.worlds.is_live = True
    assert step.meet(session, norm) == (norm, lost)
    session.state.shards.table.has_all_gradients = False
    assert step.meet(session, norm) == (None, lost)
    session.worlds.is_live = False
    with pytest.raises(PeerLostError):
        step.meet(session, norm)


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (torch.tensor(1.0), ["measure", "meet", "apply", "record('unsettled')"]),
        (None, ["measure", "meet", "hold", "record('pending')"]),
    ],
    ids=["known", "known to peers alone"],
)
def test_a_step_whose_gradient_all_hold_is_applied_or_kept_and_recorded_before_its_world_ends(
    monkeypatch: pytest.MonkeyPatch, norm: torch.Tensor | None, expected: list[str]
) -> None:
    """The order of the calls around the point of no return."""
    lost, session, computed = PeerLostError("connection reset by peer"), MagicMock(), MagicMock()
    computed.sums.is_unreadable, computed.wrong = False, ()
    session.leave.dropping = lambda batches: [[]]
    session.plan.order.advance.return_value = session.state.reached.cursor = Cursor(0, 8)
    session.state.reached.num_nonfinite = 0
    session.leaving.return_value = [False]
    session.is_validation_missed.return_value = False
    calls = MagicMock()
    monkeypatch.setattr(loop, "compute_step", lambda *_: computed)
    monkeypatch.setattr(loop, "meet", calls.meet)
    monkeypatch.setattr(loop, "validate", lambda *_, **__: None)
    calls.meet.return_value = (norm, lost)
    session.state.measure, session.state.apply, session.state.hold = calls.measure, calls.apply, calls.hold
    session.record_step = lambda *_, standing: getattr(calls, f"record({standing!r})")()
    with pytest.raises(PeerLostError):
        loop.train_steps(session)
    assert [call[0] for call in calls.mock_calls if "__" not in call[0]] == expected
