"""Handing over the applied state: which ranks send, equal bits afterwards, and rejection of damaged states."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_train.checkpoint.format.dcp import weights_digest
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.accounting import CoverageSums, SampleAccount
from elastic_train.core.order import Cursor
from elastic_train.errors import PeerLostError
from elastic_train.job import reshard
from elastic_train.job.build import build_state
from elastic_train.job.peer_states import gather_peer_states
from elastic_train.job.reshard import take_state
from elastic_train.job.state import AppliedState, StepFacts
from elastic_train.job.state_shards import Place
from elastic_train.parallel.gradient_sum import place_gradients
from elastic_train.parallel.group import Group
from elastic_train.world.equal_weights import level
from tests.memory_machine import in_memory
from tests.memory_world import group_of

TERM = 3


@given(st.lists(st.builds(Place, st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=9))
def test_every_rank_behind_gets_the_state_once_from_a_furthest_rank(places: list[Place]) -> None:
    """Senders are at the furthest place, receivers are all the others, and the work is distributed evenly."""
    is_furthest = [place == max(places) for place in places]
    givers = [reshard._giver_to(rank, is_furthest) for rank in range(len(places))]
    assert all((giver is None) == is_it for giver, is_it in zip(givers, is_furthest, strict=True))
    work = Counter(giver for giver in givers if giver is not None)
    assert all(is_furthest[giver] for giver in work)
    assert not work or max(work.values()) - min(work.get(r, 0) for r, is_it in enumerate(is_furthest) if is_it) <= 1


def trained(num_steps: int, name: str = "adamw") -> AppliedState:
    """Return a state after steps that depend on their number only, with gradients bound as in training."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 700), nn.BatchNorm1d(700), nn.Linear(700, 3, dtype=torch.float32))
    state = build_state(model, OptimizerConfig(name=name, lr=0.01, warmup_steps=2), 50, "cpu", is_fp16=False)  # type: ignore[arg-type]
    place_gradients(list(model.parameters()))
    for step in range(num_steps):
        state.optimizer.zero_grad(set_to_none=False)
        model(torch.randn(8, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        state.apply(StepFacts(Cursor(0, step + 1), CoverageSums(8, step, step), TERM, SampleAccount()), state.measure())
    return state


def come_together(group: Group, state: AppliedState) -> int | None:
    """Bring this rank to the furthest step of all; return the rank that sent its state."""
    brought = gather_peer_states(group, state, ())
    return take_state(group, state, brought).given_by


def ranks(rank: int, size: int, optimizer: str) -> dict[str, object]:
    """Begin at different steps, hand over, take one more step, and return the outcome."""
    group = group_of("world", rank, size)
    state = trained([0, 4, 3, 4][rank], optimizer)
    given_by = come_together(group, state)
    place_gradients(list(state.model.parameters()))
    state.model(torch.ones(8, 5)).square().sum().backward()
    state.apply(StepFacts(Cursor(0, 9), CoverageSums(), TERM, SampleAccount()), state.measure())
    outcome = {
        "given_by": given_by,
        "step": state.step,
        "term": state.reached.term,
        "digest": weights_digest(state.model, state.layout.dims),
    }
    buffers = {name: value.tolist() for name, value in state.model.state_dict().items() if "running" in name}
    rate = state.scheduler.get_last_lr()
    return {**outcome, "buffers": buffers, "rate": rate}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_all_ranks_continue_from_the_furthest_state(optimizer: str) -> None:
    """A new rank and one that is a step behind take the next step with the bits of the furthest ranks."""
    with mock.patch.object(reshard, "CHUNK_BYTES", 1000):  # many chunks, shared and cut
        outcomes = [one for one in in_memory(ranks, 4, optimizer) if one is not None]
    assert [one.pop("given_by") for one in outcomes] == [1, None, 3, None]
    assert outcomes[1:] == outcomes[:1] * 3
    assert (outcomes[0]["step"], outcomes[0]["term"]) == (5, TERM)


def damaging(rank: int, size: int) -> tuple[str, bool]:
    """Flip a bit in rank 1's hand-over; return the error, and True if the rank holds its state afterwards."""
    group = group_of("world", rank, size)
    state = trained(2 * rank)
    before = weights_digest(state.model, state.layout.dims)
    if rank == 0:
        transfer = group.transfer

        def flip(tensor: torch.Tensor, *, to: int | None = None, source: int | None = None) -> None:
            transfer(tensor, to=to, source=source)
            if tensor.numel() > 5000:
                tensor[-1] ^= 1

        group.transfer = flip  # type: ignore[method-assign]
    message = "nothing"
    try:
        come_together(group, state)
    except PeerLostError as error:
        message = str(error)
    return message, weights_digest(state.model, state.layout.dims) == before and state.step == 2 * rank


def test_a_damaged_state_is_not_taken_over() -> None:
    """The receiver reports the wrong bit and keeps its previous state."""
    assert in_memory(damaging, 2)[0] == ("the state that rank 1 handed over arrived damaged", True)


def drifting(rank: int, size: int) -> list[object]:
    """Two of four ranks hold the same step with different last bits; return each rank's state afterwards."""
    group = group_of("world", rank, size)
    state = trained(3)
    before = weights_digest(state.model, state.layout.dims)
    if rank in (1, 3):
        moments = next(iter(state.optimizer.state.values()))
        with torch.no_grad():
            next(state.model.parameters()).view(-1)[0] *= 1 + 1e-6
            moments["exp_avg"].view(-1)[0] += 1e-9 * rank
    others = level(group, state)
    moments = next(iter(state.optimizer.state.values()))
    same = weights_digest(state.model, state.layout.dims) == before and state.step == 3
    again = level(group, state)
    return [others, same, moments["exp_avg"].sum().item().hex(), again]


def test_ranks_that_drifted_take_rank_0s_state() -> None:
    """Weights and moments; once they are equal, nothing is sent."""
    outcomes = [one for one in in_memory(drifting, 4) if one is not None]
    assert outcomes == [[[1, 3], True, outcomes[0][2], []]] * 4
