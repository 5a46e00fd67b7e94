"""Pipeline schedules: laws for all stages and lanes, and a comparison with torch's schedules."""

from __future__ import annotations

import importlib
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.planning.arithmetic.memory import RankProgram, UnitBytes, peak_of
from elastic_train.program.schedules import Kind, Pass, Pipeline, bubble, passes_of, schedule, timetable
from tests.elastic_train.program.liveness import Event, Message, Post, Wait, check

plain = st.builds(
    Pipeline, st.sampled_from(["gpipe", "1f1b", "forward"]), st.integers(1, 9), st.integers(0, 20), st.just(1)
)
with_chunks = st.builds(
    Pipeline, st.sampled_from(["interleaved", "forward"]), st.integers(2, 6), st.integers(0, 20), st.integers(2, 4)
)
pipelines = plain | with_chunks


@given(pipelines)
def test_each_lane_runs_through_each_chunk_forward_once_and_then_backward_once(pipeline: Pipeline) -> None:
    """Each direction follows the lane order: gradients are added in that order, and messages have no tags."""
    lanes = list(range(pipeline.num_lanes))
    for stage in range(pipeline.num_stages):
        passes = passes_of(pipeline, stage)
        for chunk in range(pipeline.num_chunks):
            by_direction: dict[str, list[int]] = {"forward": [], "backward": []}
            for one in passes:
                if one.chunk == chunk:
                    by_direction[one.direction].append(one.number)
            assert by_direction == {"forward": lanes, "backward": [] if pipeline.kind == "forward" else lanes}
            for number in by_direction["backward"]:
                assert passes.index(Pass("forward", number, chunk)) < passes.index(Pass("backward", number, chunk))
        assert [one for one in schedule(pipeline, stage) if isinstance(one, Pass)] == passes


@given(st.integers(1, 9), st.integers(1, 20))
def test_a_stage_keeps_no_more_lanes_than_there_are_stages_from_it_on(num_stages: int, num_lanes: int) -> None:
    for stage in range(num_stages):
        most = lanes_alive(Pipeline("1f1b", num_stages, num_lanes), stage)
        assert most == min(num_stages - stage, num_lanes)
        assert lanes_alive(Pipeline("gpipe", num_stages, num_lanes), stage) == (num_lanes if num_stages > 1 else 1)


@given(st.integers(2, 6), st.integers(1, 20), st.integers(2, 4))
def test_chunks_keep_a_stage_less_than_two_lanes_for_each_stage(
    num_stages: int, num_lanes: int, num_chunks: int
) -> None:
    """Each lane is in one chunk, so this is part of a stage's activations: on the first stage, stages + (stages - 1) /
    chunks whole lanes (Narayanan et al. 2021), if lanes are a multiple of the stages."""
    pipeline = Pipeline("interleaved", num_stages, num_lanes, num_chunks)
    rounds = max(1, num_lanes // num_stages)
    longest = -(-num_lanes // rounds)
    for stage in range(num_stages):
        most = (num_chunks - 1) * longest + 2 * (num_stages - 1 - stage) + 1
        assert lanes_alive(pipeline, stage) == min(most, num_lanes * num_chunks)
    assert longest < 2 * num_stages


@given(pipelines)
def test_nobody_waits_for_ever_even_where_all_messages_have_to_meet(pipeline: Pipeline) -> None:
    """A sender that continues before its message is received only makes it easier."""
    events = [events_of(pipeline, stage) for stage in range(pipeline.num_stages)]
    assert sum(isinstance(event, Post) for event in events[0]) >= pipeline.num_lanes * (pipeline.num_stages > 1)
    check(events)


def events_of(pipeline: Pipeline, stage: int) -> list[Event]:
    """Return a stage's messages; it waits for those of one exchange before the next action."""
    events: list[Event] = []
    for action in schedule(pipeline, stage):
        if isinstance(action, Pass):
            continue
        messages = [Message("stage", source_of(one, stage, pipeline), False, (stage, one)) for one in action.takes]
        if action.sends is not None:
            follower = pipeline.follower(action.sends, stage)
            assert follower is not None, "nobody goes on with what is sent"
            messages.append(Message("stage", follower[0], True, follower))
        events += [Post(tuple(messages)), *(Wait(one.name) for one in messages)]
    return events


@given(pipelines)
def test_what_a_pass_needs_is_taken_before_it_and_once(pipeline: Pipeline) -> None:
    """All messages between two stages are received in the order in which they are sent: they have no tags."""
    sent: dict[tuple[int, int], list[Pass]] = {}
    taken: dict[tuple[int, int], list[Pass]] = {}
    for stage in range(pipeline.num_stages):
        here = set[Pass]()
        for action in schedule(pipeline, stage):
            if isinstance(action, Pass):
                assert (action in here) == (pipeline.needs(action, stage) is not None)
                continue
            for one in action.takes:
                assert one not in here
                here.add(one)
                taken.setdefault((source_of(one, stage, pipeline), stage), []).append(one)
            if action.sends is not None:
                follower = pipeline.follower(action.sends, stage)
                assert follower is not None
                sent.setdefault((stage, follower[0]), []).append(follower[1])
    assert sent == taken


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 12))
def test_a_bubble_is_what_stages_wait_where_passes_take_as_long(kind: Kind, num_stages: int, num_lanes: int) -> None:
    waits = bubble(Pipeline(kind, num_stages, num_lanes))
    assert waits == pytest.approx((num_stages - 1) / (num_lanes + num_stages - 1))


@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 4))
def test_chunks_make_a_bubble_as_many_times_smaller(num_stages: int, num_rounds: int, num_chunks: int) -> None:
    """Relative to the passes' time (Narayanan et al. 2021, section 2.2.2), if lanes are a multiple of stages."""
    num_lanes = num_rounds * num_stages
    waits = bubble(Pipeline("interleaved", num_stages, num_lanes, num_chunks))
    assert waits == pytest.approx((num_stages - 1) / (num_chunks * num_lanes + num_stages - 1))


@given(pipelines)
def test_at_a_tick_a_stage_does_what_others_have_prepared_before_it(pipeline: Pipeline) -> None:
    done = set[tuple[str, int, int]]()
    for tick in timetable(pipeline):
        for stage, one in enumerate(tick):
            assert one is None or pipeline.needs(one, stage) in {None, *done}
        done |= {
            (one.direction, one.number, pipeline.piece(one, stage)) for stage, one in enumerate(tick) if one is not None
        }


def lanes_alive(pipeline: Pipeline, stage: int) -> float:
    """Return the maximum number of lanes, each in one chunk, between their forward and their backward pass."""
    chunks = ((UnitBytes(kept=1.0),),) * pipeline.num_chunks
    return peak_of(RankProgram(pipeline, stage, pipeline.num_lanes, chunks)).held.activations


def source_of(one: Pass, stage: int, pipeline: Pipeline) -> int:
    needs = pipeline.needs(one, stage)
    assert needs is not None
    return needs[2] % pipeline.num_stages


@pytest.mark.parametrize(("kind", "peer"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
@pytest.mark.parametrize(("num_stages", "num_lanes"), [(2, 2), (2, 5), (3, 4), (4, 4), (4, 9)])
def test_passes_are_those_of_torchs_schedules(kind: Kind, peer: str, num_stages: int, num_lanes: int) -> None:
    """Torch needs at least as many micro-batches as stages, ours accepts any number."""
    for rank in range(num_stages):
        found = passes_of(Pipeline(kind, num_stages, num_lanes), rank)
        assert found == run_by_torch(torchs()[peer], rank, num_stages, num_lanes)


@pytest.mark.parametrize(
    ("num_stages", "num_lanes", "num_chunks"), [(2, 4, 2), (2, 8, 3), (4, 8, 2), (4, 10, 2), (4, 3, 2), (3, 9, 4)]
)
def test_passes_of_chunks_are_those_of_torchs_schedule(num_stages: int, num_lanes: int, num_chunks: int) -> None:
    """Torch needs rounds of equal length; ours accepts any number of lanes."""
    peer = torchs()["ScheduleInterleaved1F1B"]
    made = peer.__new__(peer)
    made.pp_group_size, made.n_local_stages, made._n_microbatches = num_stages, num_chunks, num_lanes
    made.microbatches_per_round = num_lanes // max(1, num_lanes // num_stages)
    for rank in range(num_stages):
        found = [
            Pass("forward" if one.computation_type.name == "FORWARD" else "backward", one.microbatch_index, piece)
            for one in made._calculate_single_rank_operations(rank)
            if one is not None
            for piece in [one.stage_index // num_stages]
        ]
        assert passes_of(Pipeline("interleaved", num_stages, num_lanes, num_chunks), rank) == found


def torchs() -> dict[str, Any]:
    """Return torch's schedules; their import takes a second, which other tests avoid."""
    return vars(importlib.import_module("torch.distributed.pipelining.schedules"))


def run_by_torch(peer: Any, rank: int, num_stages: int, num_lanes: int) -> list[Pass]:
    """Let a schedule of torch's run a stage that records its passes; nothing is sent."""
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
