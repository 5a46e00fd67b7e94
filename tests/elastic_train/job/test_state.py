"""The applied state: what a restore takes over, and what stays as configured."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_train.checkpoint.format.dcp import weights_digest
from elastic_train.checkpoint.format.layout import State
from elastic_train.checkpoint.format.state_tree import leaves_of
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.accounting import CoverageSums, SampleAccount
from elastic_train.core.order import Cursor
from elastic_train.errors import ConfigError
from elastic_train.job.build import build_state
from elastic_train.job.optimizers.schedule import rate_factor
from elastic_train.job.state import AppliedState, StepFacts, TrainProgress, clip
from elastic_train.parallel.devices.squares import clip_factor, squares_of_tensors, total_norm
from elastic_train.parallel.gradient_sum import place_gradients
from elastic_train.placement.grains import Listed
from tests.elastic_train.placement.laws import models


def built(config: OptimizerConfig, total_steps: int = 20, *, is_fp16: bool = False) -> AppliedState:
    torch.manual_seed(3)
    return build_state(nn.Linear(4, 2), config, total_steps, "cpu", is_fp16=is_fp16)


def step(state: AppliedState) -> None:
    state.apply(StepFacts(Cursor(0, state.step + 1), CoverageSums(), 1, SampleAccount()), measured(state, 0.25))


def measured(state: AppliedState, gradient: float) -> Tensor:
    """Set all parameters' gradients (for fp16 those of a scaled loss), and measure them."""
    scaled = state.scaler.scale(torch.tensor(gradient))
    for parameter in state.model.parameters():
        parameter.grad = torch.full_like(parameter, scaled.item())
    return state.measure()


def restored(state: AppliedState, config: OptimizerConfig, total_steps: int = 20) -> AppliedState:
    """Return a state of another configuration that has restored this one as from a commit."""
    saved, other = copy.deepcopy(state.shards.share.held()), built(config, total_steps)

    def fill(tensors: State) -> None:
        tensors.update(saved)

    other.restore(fill, state.reached, keeps_rates=True)
    return other


def test_only_updates_change_parameters_and_moments_and_passes_may_change_buffers() -> None:
    state = build_state(nn.BatchNorm1d(2), OptimizerConfig(), 20, "cpu", is_fp16=False)
    is_still = state.pieces.only_update_changes()
    assert is_still(("model", "weight")) and is_still(("optimizer", "state", "weight", "exp_avg"))
    assert not is_still(("model", "running_mean")) and not is_still(("scheduler", "weight"))


def test_weights_in_float16_are_not_scaled_but_may_be_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).half())
    with pytest.raises(ConfigError, match=r"'1.weight' is float16: leave out half\(\)"):
        build_state(model, OptimizerConfig(), 20, "cpu", is_fp16=True)
    model[1].requires_grad_(False)
    build_state(model, OptimizerConfig(), 20, "cpu", is_fp16=True)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_the_same_configuration_resumes_with_the_same_bits(name: str, num_steps: int) -> None:
    """Recomputed rates equal the saved ones."""
    config = OptimizerConfig(name=name, lr=0.0123, warmup_steps=3)  # type: ignore[arg-type]
    through = built(config)
    for _ in range(num_steps):
        step(through)
    again = restored(through, config)
    for _ in range(4):
        step(through)
        step(again)
        assert again.optimizer.param_groups[0]["lr"] == through.optimizer.param_groups[0]["lr"]
    assert weights_digest(again.model, again.layout.dims) == weights_digest(through.model, {})


def test_a_changed_rate_applies_from_the_next_step() -> None:
    """A changed decay or a longer schedule does so as well; moments and the schedule's position are the saved ones."""
    before = OptimizerConfig(lr=0.1, weight_decay=0.5, options={"betas": (0.8, 0.9)}, warmup_steps=2)
    state = built(before)
    for _ in range(5):
        step(state)
    after = OptimizerConfig(lr=0.004, weight_decay=0.0, options={"betas": (0.7, 0.95)}, warmup_steps=2)
    again, never_stopped = restored(state, after, total_steps=50), built(after, total_steps=50)
    for _ in range(5):
        step(never_stopped)
    for _ in range(3):
        (group,), (expected,) = again.optimizer.param_groups, never_stopped.optimizer.param_groups
        settings = ("lr", "initial_lr", "weight_decay", "betas")
        assert {key: group[key] for key in settings} == {key: expected[key] for key in settings}
        assert again.scheduler.get_last_lr() == never_stopped.scheduler.get_last_lr()
        step(again)
        step(never_stopped)


@pytest.mark.parametrize("is_fp16", [False, True])
def test_a_state_that_begins_again_updates_as_one_that_was_just_built(is_fp16: bool) -> None:
    """A rank whose part is useless in the next world gets initial weights, with initial rates and scale."""
    config = OptimizerConfig(lr=0.1, warmup_steps=6)
    state, expected = built(config, is_fp16=is_fp16), built(config, is_fp16=is_fp16)
    for _ in range(4):
        step(state)
    state.hold(StepFacts(Cursor(0, 5), CoverageSums(), 1, SampleAccount()), measured(state, math.inf))
    state.begin_again()
    state.model.load_state_dict(expected.model.state_dict())
    state.optimizer.state.clear()
    assert (state.place, state.reached.cursor, state.pending) == (expected.place, expected.reached.cursor, None)
    for _ in range(3):
        assert state.scheduler.get_last_lr() == expected.scheduler.get_last_lr()
        assert state.scaler.state_dict() == expected.scaler.state_dict()
        step(state)
        step(expected)
    assert weights_digest(state.model, state.layout.dims) == weights_digest(expected.model, {})


def test_a_schedule_of_its_own_length_does_not_depend_on_where_the_job_ends() -> None:
    """Two jobs that end at different steps have the same rates, and the cosine reaches zero where configured."""
    config = OptimizerConfig(warmup_steps=2, schedule_steps=12)
    rates = [[rate_factor(step, config, total) for step in range(15)] for total in (5, 1000)]
    assert rates[0] == rates[1]
    assert rates[0][:2] == [0.5, 1.0] and rates[0][7] == pytest.approx(0.5) and rates[0][12:] == [0.0] * 3


class Counter(nn.Linear):
    """Keeps its number of passes in a tensor that is no buffer."""

    count = 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.count)

    def set_extra_state(self, state: Tensor) -> None:
        self.count = int(state)


def test_a_commit_has_the_extra_state_of_its_own_step() -> None:
    """It had that of the first commit of a process: names are kept from save to save, and the tensors with them."""
    model = Counter(2, 2)
    share = build_state(model, OptimizerConfig(), 10, "cpu", is_fp16=False).shards.share
    for model.count in (3, 7):
        held = share.held()["model"]
        assert isinstance(held, dict)
        assert held["_extra_state"].item() == model.count


def test_gradients_stay_bound_when_a_state_is_taken_over() -> None:
    """This includes a hand-over within a world, where a rank would otherwise train on its own lanes only."""
    state, other = built(OptimizerConfig()), built(OptimizerConfig())
    flats = place_gradients(list(other.model.parameters()))[0]
    step(state)
    other.restore(lambda tree: tree.update(copy.deepcopy(state.shards.share.held())), state.reached)
    other.model(torch.ones(1, 4)).sum().backward()
    assert [parameter.grad.abs().sum() for parameter in other.model.parameters()] == [4 * 2, 2]  # type: ignore[union-attr]
    assert sum(float(flat.abs().sum()) for flat in flats) == 4 * 2 + 2


def test_what_may_be_cut_is_stored_in_the_order_of_its_parts_after_a_restoration_too() -> None:
    """Weights, gradients and moments have equal strides, which multi-tensor kernels require."""
    dims = {"0.weight": 1, "1.weight": 0}
    models = [nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)) for _ in range(2)]
    one, other = (build_state(each, OptimizerConfig(), 20, "cpu", is_fp16=False, dims=dims) for each in models)
    place_gradients(list(one.model.parameters()))
    for parameter in one.model.parameters():
        assert parameter.grad is not None
        parameter.grad.copy_(torch.randn(parameter.shape))
    one.apply(StepFacts(Cursor(0, 1), CoverageSums(), 1, SampleAccount()), one.measure())
    saved = {path: leaf.contiguous() for path, leaf in leaves_of(one.shards.share.held()) if isinstance(leaf, Tensor)}

    def fill(tree: State) -> None:
        tree.update(copy.deepcopy(one.shards.share.held()))
        for path, leaf in saved.items():
            place = tree
            for key in path[:-1]:
                place = place[key]  # type: ignore[assignment]
            place[str(path[-1])] = leaf

    other.restore(fill, one.reached, keeps_rates=True)
    assert weights_digest(other.model, dims) == weights_digest(one.model, dims)
    for state in (one, other):
        weight = state.model[0].weight  # type: ignore[index]
        assert isinstance(weight, nn.Parameter) and weight.stride() == (1, 6)
        kept = [value for value in state.optimizer.state[weight].values() if value.shape == weight.shape]
        assert len(kept) == 2 and all(value.stride() == (1, 6) for value in kept)
    assert one.model[0].weight.grad.stride() == (1, 6)  # type: ignore[index,union-attr]


def test_what_was_not_finite_leaves_weights_and_moments_alone_and_its_step_counts() -> None:
    """A non-finite loss or gradient changes nothing but the progress."""
    state = built(OptimizerConfig(warmup_steps=0, schedule="constant"))
    step(state)
    before = copy.deepcopy(state.shards.share.held())
    for value, loss in ((math.inf, 1.0), (0.25, math.nan)):
        for parameter in state.model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        state.apply(
            StepFacts(Cursor(0, state.step + 1), CoverageSums(), 1, SampleAccount(), loss=loss), state.measure()
        )
    assert (state.step, state.reached.skipped_steps, state.reached.num_nonfinite) == (3, ((1, 3),), 2)
    after = state.shards.share.held()
    for part in ("model", "optimizer"):
        for (path, tensor), (_, was) in zip(leaves_of(after[part]), leaves_of(before[part]), strict=True):  # type: ignore[arg-type]
            assert not isinstance(tensor, torch.Tensor) or torch.equal(tensor, was), path  # type: ignore[arg-type]
    step(state)
    assert (state.reached.skipped_steps, state.reached.num_nonfinite) == (((1, 3),), 0)


@pytest.mark.parametrize("options", [{}, {"fused": True}])
@pytest.mark.parametrize("leaves_out", ["overflow", "loss"])
def test_steps_that_left_out_their_update_do_not_count_in_the_average(
    leaves_out: str, options: dict[str, object]
) -> None:
    """While fp16 searches for its scale or the loss is not finite: initial weights are excluded, also after a
    resume."""
    config = OptimizerConfig(warmup_steps=0, ema_decay=0.9, options=options)  # type: ignore[arg-type]
    state = built(config, is_fp16=leaves_out == "overflow")
    gradient, loss = (math.inf, 1.0) if leaves_out == "overflow" else (0.25, math.nan)
    for _ in range(3):
        facts = StepFacts(Cursor(0, state.step + 1), CoverageSums(), 1, SampleAccount(), loss=loss)
        state.apply(facts, measured(state, gradient))
    other = built(config, is_fp16=leaves_out == "overflow")
    other.restore(lambda tree: tree.update(copy.deepcopy(state.shards.share.held())), state.reached, keeps_rates=True)
    for one in (state, other):
        assert (one.step, one.num_updates) == (3, 0)
        step(one)
        assert one.num_updates == 1
        for parameter in one.model.parameters():
            assert torch.equal(one.optimizer.state[parameter]["ema"], parameter)
    step(state)
    step(other)
    for mine, theirs in zip(state.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(state.optimizer.state[mine]["ema"], other.optimizer.state[theirs]["ema"])


def test_steps_that_fp16_left_out_do_not_count_in_the_average_in_another_precision() -> None:
    """A run that resumes without a scaler still passes their number to newcomers and commits, as fp16 does."""
    config = OptimizerConfig(warmup_steps=0, ema_decay=0.9)
    state = built(config, is_fp16=True)
    for gradient in (math.inf, 0.25, math.inf):
        facts = StepFacts(Cursor(0, state.step + 1), CoverageSums(), 1, SampleAccount())
        state.apply(facts, measured(state, gradient))
    for is_fp16 in (False, False, True):
        held = copy.deepcopy(state.shards.share.held())
        other = built(config, is_fp16=is_fp16)
        other.adopt(held, state.reached)
        resumed = built(config, is_fp16=is_fp16)
        resumed.restore(lambda tree, held=held: tree.update(held), state.reached, keeps_rates=True)  # type: ignore[misc]
        assert (resumed.num_updates, other.num_updates) == (1, 1)
        state = resumed
    assert state.scaler.get_scale() == 2.0**16


def test_a_step_without_a_target_leaves_the_scale_and_the_next_step_as_they_were() -> None:
    config = OptimizerConfig(warmup_steps=0, schedule="constant")
    state, expected = (built(config, is_fp16=True) for _ in range(2))
    facts = StepFacts(Cursor(0, 1), CoverageSums(), 1, SampleAccount(), has_target=False)
    state.apply(facts, measured(state, 0.0))
    for one in (state, expected):
        step(one)
    assert state.scaler.state_dict() == expected.scaler.state_dict()
    assert weights_digest(state.model, state.layout.dims) == weights_digest(expected.model, {})


def test_gradients_that_overflow_at_any_scale_are_not_finite() -> None:
    """Otherwise a scaler would halve its scale for ever, and training would continue silently without updates."""
    state = built(OptimizerConfig(warmup_steps=0), is_fp16=True)
    kinds = []
    for _ in range(34):
        state.apply(StepFacts(Cursor(0, state.step + 1), CoverageSums(), 1, SampleAccount()), measured(state, math.inf))
        kinds.append(state.reached.num_nonfinite)
    assert kinds == [0] * 30 + [1, 2, 3, 4]
    assert state.reached.skipped_steps == ((30, 34),)


@pytest.mark.heavy
@given(models(6), st.sampled_from([0.01, 1.0, 1e30]), st.integers(0, 2**31))
@example([Listed("empty", (0,), "torch.float32", 0), Listed("full", (3,), "torch.float32", 0)], 1.0, 0)
@settings(max_examples=40, deadline=None)
def test_clipping_is_by_the_norm_of_the_trained_grains_and_leaves_the_rest_alone(
    listed: list[Listed], limit: float, seed: int
) -> None:
    """Tied tensors count once, frozen and empty ones not at all; a gradient within the limit keeps its bits."""
    model, draw = nn.Module(), torch.Generator().manual_seed(seed)
    tied: dict[object, nn.Parameter] = {}
    for one in listed:
        values = torch.zeros(one.shape, dtype=getattr(torch, one.dtype[6:]))
        made = nn.Parameter(values, one.group is not None and values.numel() > 0)
        model.register_parameter(one.name, tied.setdefault(one.memory, made))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assume(trained)
    for parameter in trained:
        parameter.grad = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
    before = [parameter.grad.clone() for parameter in trained if parameter.grad is not None]
    state = build_state(model, OptimizerConfig(clip_norm=limit), 20, "cpu", is_fp16=False)
    squares = squares_of_tensors((gradient, None) for gradient in before)
    assert len(squares) == state.layout.trained.size
    clip(state.optimizer, limit, float(norm := state.measure()))
    assert norm == total_norm(squares.numpy())
    factor = clip_factor(float(norm), limit)
    for parameter, gradient in zip(trained, before, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient * factor)


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_does_not_show_in_a_clipped_step(threads: int) -> None:
    """The order of additions is never left to a kernel, which guarantees none."""
    digests, before = [], torch.get_num_threads()
    try:
        for number in (1, threads):
            torch.set_num_threads(number)
            state = build_state(nn.Linear(1 << 18, 1), OptimizerConfig(warmup_steps=0), 20, "cpu", is_fp16=False)
            for parameter in state.model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            state.apply(StepFacts(Cursor(0, 1), CoverageSums(), 1, SampleAccount()), norm := state.measure())
            digests.append((norm, [parameter.grad for parameter in state.model.parameters()]))
    finally:
        torch.set_num_threads(before)
    (one, gradients), (other, theirs) = digests
    assert one == other
    for gradient, their in zip(gradients, theirs, strict=True):
        assert gradient is not None and their is not None and torch.equal(gradient, their)


def test_a_state_remembers_which_steps_were_fast() -> None:
    """It stores ranges, so that a million steps of one kind are two numbers."""
    reached = TrainProgress()
    for number in range(10):
        facts = StepFacts(Cursor(0, number), CoverageSums(), 1, SampleAccount(), is_fast=number in (2, 3, 4, 8))
        reached = reached.advance(facts)
    assert reached.fast_steps == ((2, 5), (8, 9))
