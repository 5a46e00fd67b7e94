"""A rank's memory by category: each byte is counted once, the peak is reported, and when it is measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from elastic_train.checkpoint.saving.background_saves import SaveMemory
from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.accounting import CoverageSums, SampleAccount
from elastic_train.core.mesh import Mesh
from elastic_train.core.order import Cursor
from elastic_train.insight.page import Facts
from elastic_train.insight.phases import MemoryFacts, memory_facts_of
from elastic_train.job.build import build_state
from elastic_train.job.reshard import take_first_seat
from elastic_train.job.state import AppliedState, StepFacts
from elastic_train.parallel.gradient_sum import GradientSum, OfPart, make_sum, place_gradients
from elastic_train.parallel.group import Group
from elastic_train.placement.holdings import num_elements
from elastic_train.tracking.history import History
from elastic_train.training.memory import MemoryWatch, Meter, held_by, storages
from tests.elastic_train.job.sharded.shard_jobs import Shards, build, meet, train
from tests.elastic_train.job.sharded.test_held_state import newcomers
from tests.elastic_train.tracking.unqueued import Unqueued
from tests.memory_machine import in_memory

CPU = torch.device("cpu")
KINDS: dict[Shards, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("optimizer",),
    "gradients": ("optimizer", "gradients"),
    "parameters": ("optimizer", "gradients", "weights"),
}
"""The sharded state, and the memory categories that it divides."""
SMALL = 4096
"""Bytes that belong to no element: counts of updates, and gaps between tensors."""
LANES = 8
ELEMENTS = 40 * 30 + 30
"""Number of parameters of the model; its buffers have 60 more elements, and an integer."""


def built(**parallel: object) -> AppliedState:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30, affine=False))
    return build_state(
        model, OptimizerConfig(), 20, "cpu", is_fp16=False, parallel=ParallelConfig.model_validate(parallel)
    )


def trained(state: AppliedState, gradients: GradientSum) -> None:
    """Take a step of LANES lanes."""
    gradients.begin()
    for lane in range(LANES):
        with gradients.turn(lane):
            state.model(torch.randn(4, 40)).square().sum().backward()
    gradients.finish(LANES * 4.0)
    state.apply(StepFacts(Cursor(0, 1), CoverageSums(), 1, SampleAccount()), state.measure())


def test_what_a_rank_holds_is_counted_once_and_by_part() -> None:
    """Weights, gradients, two moments and a count for each parameter, and the partial sums of eight lanes."""
    state, saves = built(), SaveMemory()
    gradients = state.shards.sum_of(Group(0, 1, None, 60), LANES)
    before = Meter(CPU).measure(held_by(state, gradients, saves)).parts
    assert (before["weights"], before["gradients"], before["optimizer"], before["sums"]) == (*[4 * ELEMENTS] * 2, 0, 0)
    trained(state, gradients)
    saves.staging.buffer(5000, None)
    found = Meter(CPU).measure(held_by(state, gradients, saves))
    assert found.parts == {
        "weights": 4 * ELEMENTS,
        "gradients": 4 * ELEMENTS,
        "optimizer": 4 * (2 * ELEMENTS + 2),
        "sums": 4 * ELEMENTS * 2,  # of lanes 0 to 3 and 4 to 5 while 6 and 7 are computed
        "exchange": 0,
        "buffers": 4 * 60 + 8,
        "staging": 5000,
    }
    assert found.peak >= found.program > 0 and (found.reserved, found.host_peak) == (None, None)
    assert found.rest == max(0, found.peak - found.program - sum(found.parts.values()))


def test_a_fast_sum_puts_nothing_aside() -> None:
    state = built()
    gradients = make_sum(
        "fast", place_gradients(list(state.model.parameters()))[0], Group(0, 1, None, 60), [range(LANES)]
    )
    trained(state, gradients)
    parts = Meter(CPU).measure(held_by(state, gradients, SaveMemory())).parts
    assert (parts["gradients"], parts["sums"]) == (4 * ELEMENTS, 0)


def test_views_and_shared_weights_are_one_piece_of_memory() -> None:
    """It belongs to the first category that has it; tensors without memory of their own are ignored."""
    whole = torch.zeros(100)
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (5,), check_invariants=True)
    held = [("weights", whole), ("weights", whole[:10]), ("gradients", whole[50:]), ("sums", torch.zeros(0))]
    [found] = storages([*held, ("optimizer", sparse)], CPU)
    assert (found.part, found.num_bytes) == ("weights", 400) and found.tensor is whole


@pytest.mark.heavy
def test_the_peak_is_the_most_that_the_process_has_had() -> None:
    """It includes memory freed since; memory from before the model was built counts as it was then."""
    Path("/proc/self/clear_refs").write_text("5")  # earlier tests may have had a higher peak
    meter = Meter(CPU)
    before = meter.measure()
    taken = np.ones(1 << 24)
    assert (peak := meter.measure().peak) > before.program + 0.9 * taken.nbytes
    del taken
    after = meter.measure([("weights", torch.zeros(10**6))])
    assert after.peak > 0.99 * peak and after.program == before.program  # the kernel's own count is inexact
    assert after.rest == after.peak - after.program - 4 * 10**6


def test_on_a_gpu_the_allocator_says_and_the_host_is_another_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[object]()

    def said(value: int) -> object:
        return lambda device: asked.append(device) or value

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", said(9000))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", said(12000))
    device = torch.device("cuda:1")
    found = Meter(device).measure([("optimizer", torch.zeros(100)), ("staging", torch.zeros(50))])
    assert asked == [device, device]
    assert (found.device, found.peak, found.reserved, found.program, found.host) == ("cuda:1", 9000, 12000, 0, 600)
    assert not any(found.parts.values()) and found.rest == 9000
    assert found.host_peak is not None and found.host_peak > 10**7


@pytest.mark.parametrize(
    "facts",
    [
        MemoryFacts("cpu", 100, {"weights": 30, "sums": 0}, program=20),
        MemoryFacts("cuda:3", 100, {"weights": 30}, reserved=120, host=50, host_peak=700),
    ],
)
def test_what_is_written_is_read_again(facts: MemoryFacts) -> None:
    assert memory_facts_of(facts.as_fields()) == facts
    for damaged in ({"peak": None}, {"peak": "much"}, {"parts": None}, {"parts": {"weights": -1}}, {"host": True}):
        assert memory_facts_of({**facts.as_fields(), **damaged}) is None


def ranks(rank: int, size: int) -> dict[str, dict[str, int]]:
    """Take a step with each sharded kind of state, one copy of each shard; return the memory held afterwards."""
    torch.set_num_threads(1)
    found = {}
    for shards in KINDS:
        group, state = meet(shards, rank, size), build(shards, copies=1)
        state.shards.enter(Mesh(rank, size), None)
        if shards != "none":
            take_first_seat(group, state.shards, newcomers(size))
        train(group, state, 1)
        total = state.shards._sum
        assert total is not None, "it has trained"
        found[shards] = dict(Meter(CPU).measure(held_by(state, total, SaveMemory())).parts)
    return found


@pytest.mark.slow
def test_what_is_shared_out_is_divided_by_the_ranks() -> None:
    """A plan divides moments, then gradients, then weights. Replicated state has the same size on each rank."""
    size, layout = 3, build("none").layout
    by_rank = [found for found in in_memory(ranks, size) if found]
    trained, whole = (4 * num_elements(layout, grains) for grains in (layout.trained, np.arange(layout.num_grains)))
    for shards, divided in KINDS.items():
        expected = {"weights": whole, "gradients": trained, "optimizer": 2 * trained}
        for part, num_bytes in expected.items():
            taken = [found[shards][part] for found in by_rank]
            copies = 1 if part in divided else size
            assert sum(taken) == pytest.approx(copies * num_bytes, abs=SMALL * size), (shards, part)
            assert copies == 1 or max(taken) - min(taken) <= SMALL, (shards, part)


class Watched:
    """The memory watch of a rank that holds a tensor, its page, and its log lines."""

    def __init__(self, folder: Path, every_steps: int) -> None:
        self.page, self._folder = Facts(), folder
        self.held: list[OfPart] = [("weights", torch.zeros(25))]
        history = History(Unqueued(), folder, 3, 2)
        self.watch = MemoryWatch(Meter(torch.device("cpu")), lambda: self.held, history, every_steps, self.page)

    def lines(self) -> list[dict[str, object]]:
        paths = (self._folder / "history").glob("00000003-00002-*.jsonl")
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_memory_is_looked_at_after_the_first_step_and_every_so_many(tmp_path: Path) -> None:
    """A world's end adds a line if steps were applied since, so that the last line covers all of them."""
    watched = Watched(tmp_path, every_steps=3)
    watched.watch.say()
    for step in range(11, 17):
        watched.watch.step(step)
    watched.held.append(("sums", torch.zeros(50)))
    watched.watch.say()
    watched.watch.say()
    lines = watched.lines()
    assert [(line["op"], line["step"]) for line in lines] == [("memory", 11), ("memory", 14), ("memory", 16)]
    first, _, last = (memory_facts_of(line) for line in lines)
    assert first is not None and last is not None and first.device == "cpu"
    assert (first.parts["weights"], first.parts["sums"], last.parts["sums"]) == (100, 0, 200)
    assert watched.page.memory == last
