"""Weights gathered block by block give the bits of replicated state, however a pass uses its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.errors import ConfigError
from elastic_train.job.build import build_state
from elastic_train.job.reshard import take_first_seat
from elastic_train.job.state import AppliedState
from elastic_train.job.units.blocks import Recompute, recording_order
from elastic_train.parallel.group import Group
from elastic_train.parallel.reduce_scatter_sum import ReduceScatterSum
from elastic_train.parallel.unit_weights import UnitFlats, UnitWeights
from elastic_train.placement.holdings import Run
from elastic_train.placement.seating import Move
from tests.elastic_train.job.sharded.shard_jobs import Shards, compute, fingerprint, meet, shards_of, train
from tests.elastic_train.job.sharded.test_held_state import newcomers
from tests.memory_machine import in_memory

WIDTH, NUM_BLOCKS, STEPS = 64, 5, 2


class Block(nn.Module):
    """Two layers; the lower one is frozen if the block is, and runs after all trained layers."""

    def __init__(self, *, is_frozen: bool = False) -> None:
        super().__init__()
        self.lower, self.upper = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lower.requires_grad_(not is_frozen)

    def forward(self, x: Tensor) -> Tensor:
        given = x.to(self.lower.weight.dtype)
        return x + self.upper(torch.tanh(self.lower(given)))  # type: ignore[no-any-return]


class Blocks(nn.Module):
    """An embedding, blocks in the order that `path` returns for each pass, and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.tail = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        """Listed first, used last."""
        self.embed = nn.Embedding(301, WIDTH)
        self.blocks = nn.ModuleList(Block(is_frozen=kind == "partly frozen") for _ in range(NUM_BLOCKS))
        if kind == "lower frozen":
            for number in range(3):
                self.blocks[number].requires_grad_(False)
            self.embed.requires_grad_(False)
        if kind == "of two types":
            self.blocks[-1].bfloat16()
        if kind == "tied across":
            self.blocks[3].get_submodule("upper").weight = self.blocks[1].get_submodule("upper").weight
        if kind == "lists of parts":
            self.blocks = nn.ModuleList(nn.ModuleList(block.children()) for block in self.blocks)

    def path(self) -> Iterator[nn.Module]:
        left_out = int(torch.randint(NUM_BLOCKS, ())) if self.kind == "left out" else None
        for number, block in enumerate(self.blocks):
            if number != left_out:
                yield block

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.path():
            if isinstance(block, nn.ModuleList):
                x = x + block[1](torch.tanh(block[0](x)))
            elif self.kind.startswith("computed again"):
                x = checkpoint(block, x, use_reentrant=self.kind.endswith("reentrantly"))
            else:
                x = block(x)
        for layer in self.tail:
            x = x + layer(x)
        return x  # type: ignore[no-any-return]


KINDS = (
    "plain",
    "left out",
    "computed again",
    "computed again reentrantly",
    "partly frozen",
    "lower frozen",
    "tied across",
    "of two types",
    "lists of parts",
    "units",
    "selective",
)


def build(kind: str, shards: Shards, *, known_order: bool = True) -> AppliedState:
    torch.manual_seed(1)
    model = Blocks(kind)
    config = OptimizerConfig(lr=0.01, warmup_steps=2, clip_norm=1e-3)
    recompute: Recompute = "units" if kind == "units" else "selective" if kind == "selective" else "none"
    parallel = ParallelConfig(shards=shards, copies=1, recompute=recompute if shards != "none" else "none")
    state = build_state(model, config, 50, "cpu", is_fp16=False, parallel=parallel)
    if known_order:
        with recording_order(model, state.shards.order):
            model(torch.zeros(1, 2, dtype=torch.int64))
    return state


def ranks(rank: int, size: int, kind: str) -> list[str]:
    """Train a kind of model; return the weights after each step."""
    torch.set_num_threads(1)
    group, state, found = meet("world", rank, size), build(kind, "parameters"), []
    take_first_seat(group, state.shards, newcomers(size))
    state.shards.share.agree_on_order(group, state.shards.order)
    for step in range(STEPS):
        train(group, state, step + 1)
        found.append(fingerprint(group, state))
    group.barrier()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_whole_state_whatever_a_pass_does_with_its_blocks(kind: str) -> None:
    """Each lane may skip another block, recompute blocks, or train only part of them."""
    torch.set_num_threads(1)
    whole, alone, expected = build(kind, "none"), Group(0, 1, None, 60), []
    for step in range(STEPS):
        train(alone, whole, step + 1)
        expected.append(fingerprint(alone, whole))
    for size in (1, 3):
        assert in_memory(ranks, size, kind) == [expected] * size


def seated(kind: str, *, known_order: bool = True) -> tuple[Group, AppliedState]:
    """Return the state of one rank, which holds everything but gathers it nevertheless."""
    group, state = Group(0, 1, None, 60), build(kind, "parameters", known_order=known_order)
    take_first_seat(group, state.shards, newcomers(1))
    state.shards.share.agree_on_order(group, state.shards.order)
    return group, state


@pytest.mark.parametrize("last", [NUM_BLOCKS, 2])
def test_two_blocks_at_most_are_whole_at_a_time(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """One block runs or is skipped while the next one's weights are gathered; between steps none is gathered."""
    group, state = seated("plain")
    assert isinstance(state.model, Blocks)
    first = state.model.blocks[:last]
    state.model.path = lambda: iter(first)  # type: ignore[method-assign]
    flat, whole, post = shards_of(state).flat, list[int](), UnitWeights._post

    def watch(weights: UnitWeights, number: int) -> None:
        post(weights, number)
        whole.append(sum(vector.untyped_storage().nbytes() for vector in flat.weights))

    monkeypatch.setattr(UnitWeights, "_post", watch)
    compute(group, state)
    blocks, (rest,) = ([sum(v.nbytes for v in unit.flats.values()) for unit in units] for units in sized(flat.blocks()))
    assert len(whole) == 1 + 7 * (2 * len(blocks) - 1)
    assert max(blocks) + rest < max(whole) <= 2 * max(blocks) + rest
    assert not any(vector.untyped_storage().nbytes() for vector in flat.weights)


def test_only_real_numbers_are_rounded_and_kept_no_longer_than_their_block_waits() -> None:
    """Indexes and complex numbers have no bf16. A rank that is alone sends nothing that would have to stay."""
    real, whole, pair = torch.tensor([1 / 3, 2.0]), torch.tensor([1_000_001]), torch.tensor([1 + 2j])
    held = {Run(number, 0, len(weights)): weights for number, weights in enumerate((real, whole, pair))}
    flats = {run.flat: torch.zeros_like(weights) for run, weights in held.items()}
    group, shares = Group(0, 1, None, 60), [Move(0, 0, list(held))]
    weights = UnitWeights([], UnitFlats("rest", flats), group, shares, held.__getitem__, None, torch.bfloat16)
    with weights.turn([0], trains=False):
        assert [flat.tolist() for flat in flats.values()] == [[0.333984375, 2.0], [1_000_001], [1 + 2j]]
        assert not weights._lent
        assert not weights._rounded_of


def sized(units: tuple[list[UnitFlats], UnitFlats]) -> tuple[list[UnitFlats], list[UnitFlats]]:
    blocks, rest = units
    return blocks, [rest]


def test_blocks_without_gradients_hold_no_others_back() -> None:
    """If only gradients are sharded, all are sent before the lane ends, whatever is frozen in between."""
    state, group = build("lower frozen", "gradients"), Group(0, 1, None, 60)
    take_first_seat(group, state.shards, newcomers(1))
    gradients = state.shards.sum_of(group, 1)
    assert isinstance(gradients, ReduceScatterSum)
    gradients.begin()
    with gradients.turn(0):
        state.model(torch.zeros(3, 4, dtype=torch.int64)).sum().backward()
        assert all(parameter.grad is None for parameter in state.model.parameters())


def test_a_parameter_that_is_used_while_it_is_not_there_is_an_error() -> None:
    """It must neither read unrelated memory nor crash."""
    group, state = seated("plain")
    assert isinstance(state.model, Blocks)
    forward, block = state.model.forward, state.model.blocks[2]
    state.model.forward = lambda tokens: forward(tokens) @ block.upper.weight  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="a block's parameter that is used while the block does not run"):
        compute(group, state)


@pytest.mark.parametrize("use", ["in the input of its block", "in a copy", "by a method", "in the loss"])
def test_a_model_that_uses_a_block_while_it_does_not_run_is_refused_before_training(use: str) -> None:
    """Such weights may be there, on their way or gone: steps would have wrong numbers, or end the process."""
    state = build("plain", "parameters", known_order=False)
    model, order = state.model, state.shards.order
    assert isinstance(model, Blocks)
    block = model.blocks[2]
    assert isinstance(block, Block)
    if use == "in the input of its block":
        model.path = lambda: iter([block.lower, block])  # type: ignore[method-assign]
    elif use == "by a method":
        model.path = lambda: iter([block.forward])  # type: ignore[method-assign, list-item]
    with (
        pytest.raises(ConfigError, match=r"'blocks.2' that is used while the block does not run.* set .* to gradients"),
        recording_order(model, order),
    ):
        weight = block.upper.weight.T[1:] if use == "in a copy" else model(torch.zeros(1, 2, dtype=torch.int64))
        (weight.bfloat16() if use == "in a copy" else block.upper.weight.square()).sum()


def test_shapes_and_types_of_a_block_are_known_while_it_does_not_run() -> None:
    state = build("plain", "parameters", known_order=False)
    assert isinstance(state.model, Blocks)
    with recording_order(state.model, state.shards.order):
        weight = state.model.blocks[2].get_parameter("upper.weight")
        weight.T.new_zeros(2, dtype=weight.dtype, device=weight.device).add_(torch.ones_like(weight.detach()).shape[0])
        state.model(torch.zeros(1, 2, dtype=torch.int64))


def test_a_block_whose_backward_pass_cannot_be_noticed_is_refused_before_training() -> None:
    """torch looks into tuples, lists and dicts alone: the block's weights would be gone in its backward pass."""
    state = build("plain", "parameters", known_order=False)
    assert isinstance(state.model, Blocks)
    block = state.model.blocks[2]
    assert isinstance(block, Block)
    forward, block.forward = block.forward, lambda x: SimpleNamespace(x=forward(x))  # type: ignore[method-assign, assignment, return-value]
    with (
        pytest.raises(ConfigError, match=r"'blocks.2', which returns a SimpleNamespace in which torch finds no tensor"),
        recording_order(state.model, state.shards.order),
    ):
        state.model(torch.zeros(1, 2, dtype=torch.int64))


def runs_again(model: Blocks) -> Callable[[], Iterator[nn.Module]]:
    return lambda: iter([*model.blocks, model.blocks[1]])


def test_a_model_that_runs_a_block_twice_is_refused_before_training() -> None:
    """If it does so only later, that step fails: no rank waits for an exchange that never starts."""
    state = build("plain", "parameters", known_order=False)
    assert isinstance(state.model, Blocks)
    state.model.path = runs_again(state.model)  # type: ignore[method-assign]
    with (
        pytest.raises(ConfigError, match=r"'blocks.1', which runs more than once.*to none, or to gradients"),
        recording_order(state.model, state.shards.order),
    ):
        state.model(torch.zeros(1, 2, dtype=torch.int64))
    group, state = seated("plain")
    assert isinstance(state.model, Blocks)
    state.model.path = runs_again(state.model)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"'blocks.1', which runs after 'blocks.4'.*to none, or to gradients"):
        compute(group, state)


def test_the_order_of_blocks_is_that_of_a_pass() -> None:
    """The tail is listed first and runs last; a block that does not run is ordered by the list."""
    _, state = seated("plain")
    blocks = [f"blocks.{number}" for number in range(NUM_BLOCKS)]
    assert shards_of(state).flat.block_names == [*blocks, "tail.0", "tail.1"]
    _, state = seated("lists of parts")
    parts = [f"{name}.{part}" for name in blocks for part in (0, 1)]
    assert shards_of(state).flat.block_names == [*parts, "tail.0", "tail.1"]
    _, state = seated("left out")
    assert sorted(shards_of(state).flat.block_names) == [*blocks, "tail.0", "tail.1"]
    _, state = seated("plain", known_order=False)
    assert shards_of(state).flat.block_names == ["tail.0", "tail.1", *blocks]
