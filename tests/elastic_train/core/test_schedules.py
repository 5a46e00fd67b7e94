"""Pipeline schedules: laws for all stages and lanes, and torch's own schedules beside them."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.core.schedules import Action, Exchange, Kind, Pass, bubble, passes_of, peak_lanes, schedule

kinds = st.sampled_from(["gpipe", "1f1b"])


@given(kinds, st.integers(1, 9), st.integers(0, 20))
def test_each_lane_runs_forward_once_and_then_backward_once(kind: Kind, num_stages: int, num_lanes: int) -> None:
    """In the order of the lanes, each way: gradients are added in that order, and messages have no other name."""
    for stage in range(num_stages):
        passes = passes_of(kind, stage, num_stages, num_lanes)
        for direction in ("forward", "backward"):
            assert [one.number for one in passes if one.direction == direction] == list(range(num_lanes))
        for number in range(num_lanes):
            assert passes.index(Pass("forward", number)) < passes.index(Pass("backward", number))
        assert [one for one in schedule(kind, stage, num_stages, num_lanes) if isinstance(one, Pass)] == passes


@given(st.integers(1, 9), st.integers(1, 20))
def test_a_stage_keeps_no_more_lanes_than_there_are_stages_from_it_on(num_stages: int, num_lanes: int) -> None:
    for stage in range(num_stages):
        assert peak_lanes(passes_of("1f1b", stage, num_stages, num_lanes)) == min(num_stages - stage, num_lanes)
        assert peak_lanes(passes_of("gpipe", stage, num_stages, num_lanes)) == num_lanes


@given(kinds, st.integers(1, 9), st.integers(0, 20))
def test_nobody_waits_for_ever_even_where_all_messages_have_to_meet(
    kind: Kind, num_stages: int, num_lanes: int
) -> None:
    """A sender that goes on before its message is taken only makes it easier."""
    assert blocked([list(schedule(kind, stage, num_stages, num_lanes)) for stage in range(num_stages)]) == []


@given(kinds, st.integers(1, 6), st.integers(1, 12))
def test_a_bubble_is_what_the_first_stage_waits_where_passes_take_as_long(
    kind: Kind, num_stages: int, num_lanes: int
) -> None:
    """By a clock that runs all stages, a tick for each pass, beside the closed form."""
    actions = [passes_of(kind, stage, num_stages, num_lanes) for stage in range(num_stages)]
    done: dict[tuple[str, int, int], int] = {}
    for tick in range(1, 2 * (num_lanes + num_stages) + 1):
        for stage, mine in enumerate(actions):
            if mine and _is_ready(mine[0], stage, num_stages, done, tick):
                one = mine.pop(0)
                done[one.direction, one.number, stage] = tick
    assert not any(actions)
    waits = (max(done.values()) - 2 * num_lanes) / max(done.values())
    assert waits == pytest.approx(bubble(num_stages, num_lanes))


def _is_ready(one: Pass, stage: int, num_stages: int, done: dict[tuple[str, int, int], int], tick: int) -> bool:
    """Say whether what a pass needs was there before a tick."""
    if one.direction == "forward":
        return stage == 0 or done.get(("forward", one.number, stage - 1), tick) < tick
    return stage == num_stages - 1 or done.get(("backward", one.number, stage + 1), tick) < tick


def blocked(actions: list[list[Action]]) -> list[int]:
    """Run stages whose exchanges end when all of their messages have met their other ends; return who does not end.

    A message meets its other end while both stages are in the exchanges that have it.
    """
    done: set[tuple[str, int, int]] = set()  # direction, number, and the stage that sends
    at = [0] * len(actions)
    is_moving = True
    while is_moving:
        is_moving = False
        open_ends = {
            stage: ends_of(stage, mine[at[stage]]) if at[stage] < len(mine) else set()
            for stage, mine in enumerate(actions)
        }
        sides = Counter(end for ends in open_ends.values() for end in ends)
        done |= {end for end, count in sides.items() if count == 2}
        for stage, mine in enumerate(actions):
            if at[stage] < len(mine) and open_ends[stage] <= done:
                at[stage] += 1
                is_moving = True
    return [stage for stage, mine in enumerate(actions) if at[stage] < len(mine)]


def ends_of(stage: int, action: Action) -> set[tuple[str, int, int]]:
    if isinstance(action, Pass):
        return set()
    ends = set()
    if action.sends is not None:
        ends.add((action.sends.direction, action.sends.number, stage))
    if action.awaits is not None:
        source = stage - 1 if action.awaits.direction == "forward" else stage + 1
        ends.add((action.awaits.direction, action.awaits.number, source))
    return ends


def test_stages_that_await_what_nobody_sends_are_seen_to_be_blocked() -> None:
    """The check above can fail: a stage that would first send back and then take on waits for one that does alike."""
    first = [Exchange(Pass("forward", 0), None), Exchange(None, Pass("backward", 0))]
    assert blocked([list(first), [Exchange(None, Pass("forward", 0)), Exchange(Pass("backward", 0), None)]]) == []
    assert blocked([list(first), [Exchange(Pass("backward", 0), None), Exchange(None, Pass("forward", 0))]]) == [0, 1]


@pytest.mark.parametrize(("kind", "peer"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
@pytest.mark.parametrize(("num_stages", "num_lanes"), [(2, 2), (2, 5), (3, 4), (4, 4), (4, 9)])
def test_passes_are_those_of_torchs_schedules(kind: Kind, peer: str, num_stages: int, num_lanes: int) -> None:
    """As torch runs them; it wants at least as many micro-batches as stages, and ours takes any number."""
    schedules = vars(importlib.import_module("torch.distributed.pipelining.schedules"))  # a second, for this test alone
    for rank in range(num_stages):
        assert passes_of(kind, rank, num_stages, num_lanes) == run_by_torch(
            schedules[peer], rank, num_stages, num_lanes
        )


def run_by_torch(peer: Any, rank: int, num_stages: int, num_lanes: int) -> list[Pass]:
    """Let a schedule of torch's run a stage that notes what it is asked for; nothing is sent."""
    stage, seen = MagicMock(num_stages=num_stages, stage_index=rank, is_last=False, has_backward=True), list[Pass]()
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, name).return_value = []
    stage.forward_one_chunk.side_effect = lambda number, *_, **__: seen.append(Pass("forward", number))
    stage.backward_one_chunk.side_effect = lambda number, *_, **__: seen.append(Pass("backward", number))
    schedule = peer(stage, num_lanes, loss_fn=MagicMock())
    schedule._stage_forward_initialized = schedule._stages_forward_initialized = True
    schedule._initialize_stage = schedule._initialize_stages = MagicMock()
    schedule._step_microbatches([()] * num_lanes, [{}] * num_lanes)
    return seen
