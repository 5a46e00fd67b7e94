"""The sum of sharded gradients: exchanges in flight between turns, and after a turn or a step that ended early."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from elastic_train.errors import PeerLostError
from elastic_train.job.reshard import take_first_seat
from elastic_train.job.state import AppliedState
from elastic_train.parallel.group import Group
from elastic_train.parallel.reduce_scatter_sum import ReduceScatterSum
from tests.elastic_train.job.sharded.shard_jobs import NUM_LANES, build, loss_of
from tests.elastic_train.job.sharded.test_held_state import newcomers


def begun(per_turn: int = 1) -> tuple[AppliedState, ReduceScatterSum]:
    """Return the state of one rank that sums the gradients of all lanes, and the sum, begun."""
    state, group = build("gradients", copies=1), Group(0, 1, None, 60)
    take_first_seat(group, state.shards, newcomers(1))
    total = state.shards.sum_of(group, NUM_LANES)
    assert isinstance(total, ReduceScatterSum)
    if per_turn > 1:
        tree = total._courses[0].tree._replace(per_turn=per_turn)
        total = ReduceScatterSum([tree], total._homes)
    total.begin()
    return state, total


def add(state: AppliedState, total: ReduceScatterSum, lane: int) -> None:
    with total.turn(lane):
        state.scaler.scale(loss_of(state, lane)).backward()  # type: ignore[no-untyped-call]


def squares_of(state: AppliedState, total: ReduceScatterSum) -> Tensor:
    """Add all lanes; return the squares of the mean's grains."""
    for lane in range(NUM_LANES):
        add(state, total, lane)
    total.finish(3.0 * NUM_LANES)
    squares = state.measure()
    total.close()
    state.shards._close_sums()
    return squares


def test_one_unit_is_in_flight_between_turns() -> None:
    """It arrives during the next turn; each further one would need memory."""
    state, total = begun()
    for lane in range(3):
        add(state, total, lane)
        assert len(total._courses[0].in_flight) == 1
    state.shards._close_sums()


def test_a_step_that_was_not_applied_leaves_nothing_in_the_next() -> None:
    expected = squares_of(*begun())
    state, total = begun()
    add(state, total, 0)
    total.begin()
    assert torch.equal(squares_of(state, total), expected)


def test_a_turn_that_fails_keeps_no_exchange() -> None:
    """Its requests would keep the connections of a group that is abandoned."""
    state, total = begun()
    add(state, total, 0)
    with pytest.raises(PeerLostError), total.turn(1):
        raise PeerLostError("gone")
    assert not total._courses[0].in_flight
    state.shards._close_sums()


@pytest.mark.parametrize("per_turn", [2, NUM_LANES])
def test_several_leaves_a_turn_have_the_same_sum(per_turn: int) -> None:
    """All but the last leaf of a turn are kept whole until it; the last turn may have fewer."""
    assert torch.equal(squares_of(*begun(per_turn)), squares_of(*begun()))
