"""A turn by units: what a pass needs is gathered, little is gathered at once, and all actions run in any pass."""

from __future__ import annotations

import itertools
import random

import pytest

from elastic_train.planning.arithmetic.memory import by_unit
from elastic_train.program.schedules import (
    REST,
    Begin,
    End,
    Enter,
    Free,
    Pass,
    Pipeline,
    UnitAction,
    Walk,
    gathering_turn,
    reducing_turn,
    step_program,
)


def turn(num_blocks: int, *, trains: bool = True, reduces: bool = True) -> tuple[UnitAction, ...]:
    return gathering_turn(num_blocks, has_rest=False, trains=trains, reduces=reduces)


@pytest.mark.parametrize("num_blocks", range(6))
@pytest.mark.parametrize("trains", [True, False])
def test_a_pass_comes_to_blocks_that_are_there_and_two_are_whole_at_most(num_blocks: int, trains: bool) -> None:
    begun, there = set[int](), set[int]()
    for action in turn(num_blocks, trains=trains, reduces=trains):
        match action:
            case Begin("gather", unit):
                assert unit not in begun | there
                begun.add(unit)
            case End("gather", unit):
                begun.remove(unit)
                there.add(unit)
            case Free(unit):
                there.remove(unit)
            case Enter(unit=unit):  # the pass waits for this one
                assert unit in begun | there and REST in there
        assert len((begun | there) - {REST}) <= 2
    assert there == {REST} and not begun, "the rest of the model stays"


@pytest.mark.parametrize("num_blocks", range(6))
def test_gradients_go_in_the_opposite_order_of_blocks_one_after_the_other(num_blocks: int) -> None:
    """Each is in flight during the pass of the next unit only; a turn's last one, until the next turn's first.

    A model of one unit is not in flight during a pass.
    """
    units = [*reversed(range(num_blocks)), REST]
    for has_rest in (False, True):
        actions = gathering_turn(num_blocks, has_rest=has_rest, trains=True, reduces=True)
        reduced = [action for action in actions if isinstance(action, Begin | End) and action.what == "reduce"]
        before = [*([REST] if has_rest else []), *units]
        assert [one.unit for one in reduced if isinstance(one, Begin)] == units
        assert [one.unit for one in reduced if isinstance(one, End)] == (before[:-1] if num_blocks else [REST])
        assert list(reducing_turn(num_blocks + 1, is_first=not has_rest)) == reduced


def test_units_are_reduced_in_the_pass_that_leaves_them_whichever_turn_it_is() -> None:
    """What is on its way from the turn before delays none of them."""
    actions = by_unit(
        step_program(Pipeline("1f1b", 1, 3), 0), 2, lambda leaf: reducing_turn(3, is_first=leaf.number == 0)
    )
    passes = [done for action, done in actions if isinstance(action, Pass) and action.direction == "backward"]
    for number, done in enumerate(passes):
        before = [End("reduce", REST)] if number else []
        left = [Begin("reduce", 1), *before, Enter("backward", 0), Begin("reduce", 0), End("reduce", 1)]
        assert list(done) == [Enter("backward", 1), *left, Enter("backward", REST)]


def test_a_pass_may_leave_blocks_out_and_come_to_them_again() -> None:
    """All actions still run once, in the same order as on a rank without a lane."""
    actions = turn(4)
    enters = [action for action in actions if isinstance(action, Enter)]
    for seed in range(20):
        drawn = random.Random(seed)
        done = list[UnitAction]()
        walk = Walk(actions, done.append)
        for enter in enters:
            for _ in range(drawn.randrange(3)):
                walk.enter(enter.direction, enter.unit)
                assert enter in done
        walk.finish()
        assert done == list(actions) and walk.next is None
    assert not any(one == other for one, other in itertools.pairwise(actions))
