"""Test an optimizer before training: step small parameters, save, restore, and compare bit by bit.

Everything that determines a run's result must be in its commits. An optimizer may hide state (in a closure, a module, a
global generator) or need something that training does not provide (a closure, sparse gradients). Both show here within
milliseconds and are refused by name. Commits check for state that appears after NUM_STEPS.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_train.checkpoint.format.layout import Planner, State, leaves_by_path
from elastic_train.errors import ConfigError
from elastic_train.job.optimizers.optimizer_memory import OWN, OptimizerMemory
from elastic_train.job.units.blocks import same_bits
from elastic_train.job.units.generators import moved_generators, states_of_generators, undisturbed

NUM_STEPS, SAVED_AT = 12, (2, 11)
_NUM_STEPS_OF_TORCHS, _TORCHS_SAVED_AT = 4, (2,)
"""Torch's own optimizers have all their state from the first step on."""
Shapes = Sequence[Sequence[tuple[int, ...]]]
"""Parameter shapes, by group."""
_WAY_OUT = "choose another optimizer, such as optimizer.name: adamw"


class Saved(NamedTuple):
    """The state that a commit would hold."""

    optimizer: State
    weights: list[Tensor]


class Twin:
    """Small parameters, by group, and an optimizer of them."""

    def __init__(
        self, make: MakeOptimizer, settings: Sequence[Mapping[str, Any]], values: Sequence[Sequence[Tensor]]
    ) -> None:
        groups = [[nn.Parameter(value.clone()) for value in group] for group in values]
        self.parameters = [one for group in groups for one in group]
        pairs = zip(settings, groups, strict=True)
        self.optimizer = make([{**own, "params": parameters} for own, parameters in pairs])

    def update(self, gradients: Sequence[Tensor]) -> None:
        """Take one step."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        self.optimizer.step()


class Cast(Twin):
    """A twin that is checked at each step, saved and loaded; `name` is the optimizer's configured name."""

    def __init__(
        self, name: str, make: MakeOptimizer, settings: Sequence[Mapping[str, Any]], values: Sequence[Sequence[Tensor]]
    ) -> None:
        super().__init__(make, settings, values)
        self.name, self.names = name, {id(one): str(number) for number, one in enumerate(self.parameters)}
        self.memory = OptimizerMemory(self.optimizer, self.names)

    def step(self, gradients: Sequence[Tensor], *, may_draw: bool = False) -> None:
        """Take one step; raise ConfigError if it fails, draws random numbers, or changes its rate."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        drawn = states_of_generators()
        try:
            self.update(gradients)
        except Exception as error:  # a user's code may raise anything
            raise ConfigError(_why(self.name, self.optimizer, error)) from error
        if not may_draw and moved_generators(drawn):
            raise ConfigError(
                f"optimizer.name: '{self.name}' draws from the random numbers of the process, which differ from world "
                "to world: let it draw from a torch.Generator that it makes, seeds and keeps in an attribute"
            )
        if rates != [group["lr"] for group in self.optimizer.param_groups]:
            raise ConfigError(
                f"optimizer.name: '{self.name}' changes its own 'lr', which optimizer.schedule sets before each step: "
                "let it scale its update by another key of its groups"
            )

    def save(self) -> Saved:
        """Return the state that a commit would hold; raise ConfigError if it cannot be saved."""
        tree, planner = self.memory.tree(self.names), Planner()
        leaves = leaves_by_path({"optimizer": tree})
        try:
            planner.encode(planner.plan({"optimizer": tree}, leaves, 1), leaves)
        except ConfigError as error:
            raise ConfigError(f"optimizer.name: '{self.name}' keeps what a commit cannot hold: {error}") from error
        return Saved(_copied(tree), _copied(self.parameters))

    def load(self, saved: Saved) -> None:
        """Load saved state, as a new process does."""
        tree, weights = _copied(saved.optimizer), saved.weights
        for parameter, value in zip(self.parameters, weights, strict=True):
            parameter.data.copy_(value)
        self.memory.take_state(tree["state"], self.names)
        self.memory.take_own(tree.get(OWN, {}), self.names)


def rehearse(
    name: str,
    make: MakeOptimizer,
    settings: Sequence[Mapping[str, Any]],
    shapes: Shapes,
    device: torch.device | str,
    *,
    by_columns: bool = False,
) -> None:
    """Raise ConfigError unless an optimizer can step, and steps identically after a save and load.

    With `by_columns`, matrices are stored column-major, as those cut by columns are. Draws from global generators are
    not checked then: threads of a running job may draw at the same time.
    """
    if torch.device(device).type == "meta":
        device = "cpu"  # a state that is only described computes nothing
    generator = torch.Generator().manual_seed(0)
    sizes = [shape for group in shapes for shape in group]

    def drawn(shape: tuple[int, ...]) -> Tensor:
        value = torch.randn(shape, generator=generator).to(device)
        return value.movedim(-1, 0).contiguous().movedim(0, -1) if by_columns else value

    values = [[drawn(shape) for shape in group] for group in shapes]
    with undisturbed():
        first = Cast(name, make, settings, values)
        is_torchs = type(first.optimizer).__module__.startswith("torch.optim.")
        num_steps, saved_at = (_NUM_STEPS_OF_TORCHS, _TORCHS_SAVED_AT) if is_torchs else (NUM_STEPS, SAVED_AT)
        steps = [[drawn(shape) for shape in sizes] for _ in range(num_steps)]
        _check_modes(first)
        saved, is_repeatable = dict[int, Saved](), True
        for number, gradients in enumerate(steps):
            if number in saved_at:
                saved[number] = first.save()
            first.step(gradients, may_draw=by_columns)
        through = first.save()
        for begin in (0, *saved_at):
            again = Cast(name, make, settings, values)
            if begin:
                again.load(saved[begin])
            for gradients in steps[begin:]:
                again.step(gradients, may_draw=by_columns)
            ended = again.save()
            if begin == 0:  # differences of its own, such as the time of day, are no fault of the commit
                is_repeatable = _same(through.optimizer, ended.optimizer)
            if not _same(through.weights, ended.weights):
                raise ConfigError(_differs(name, first, is_restored=begin > 0))
            if is_repeatable and not _same(through.optimizer, ended.optimizer):
                raise ConfigError(_differs(name, first, is_restored=True))


def _copied(tree: Any) -> Any:
    """Copy a nested state as a commit does; the copies share no memory."""
    if isinstance(tree, Tensor):
        return tree.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(tree, Mapping):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else copy.deepcopy(tree)


def _same(one: object, other: object) -> bool:
    """Return True if two nested states are bit-identical."""
    mine, theirs = leaves_by_path({"": one}), leaves_by_path({"": other})
    return mine.keys() == theirs.keys() and all(_equal(mine[path], theirs[path]) for path in mine)


def _equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    return repr(one) == repr(other)  # NaN equals itself


def _check_modes(cast: Cast) -> None:
    """Refuse an optimizer that uses different weights for training and validation."""
    if all(callable(getattr(cast.optimizer, mode, None)) for mode in ("train", "eval")):
        raise ConfigError(
            f"optimizer.name: '{cast.name}' needs train() and eval() around validations and commits, since the weights "
            f"that it trains are not those to use, and nothing here calls them: {_WAY_OUT}"
        )


def _why(name: str, optimizer: Optimizer, error: Exception) -> str:
    """Say which requirement of the optimizer is not met."""
    said = str(error).strip().partition("\n")[0] or "without a message"
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if "closure" in said or (closure is not None and closure.default is closure.empty):
        need = "a closure that computes the loss again"
    elif "sparse" in said or "dense gradients" in said:
        need = "sparse gradients"
    elif "train mode" in said or ".train()" in said:
        need = "its train() called before"
    elif "view size is not compatible" in said:
        return (
            f"optimizer.name: '{name}' calls `view` on a tensor that is not contiguous: the task's model stores some "
            f"matrices column by column (`placements`): call `reshape` there, or {_WAY_OUT}"
        )
    else:
        return (
            f"optimizer.name: '{name}' fails in a rehearsal of its step ({type(error).__name__}: {said}): set its "
            f"optimizer.options so that it can update dense parameters here, or {_WAY_OUT}"
        )
    return (
        f"optimizer.name: '{name}' needs {need} ({said}), and here a step has one dense gradient, summed over all "
        f"lanes: {_WAY_OUT}"
    )


def _differs(name: str, cast: Cast, *, is_restored: bool) -> str:
    if not is_restored:
        return (
            f"optimizer.name: '{name}' has other results when the same steps are repeated: it keeps something outside "
            "of itself, or draws random numbers without a fixed seed; keep it in its state, groups or attributes"
        )
    hidden = [key for key in vars(cast.optimizer) if key in cast.memory.opaque_attributes()]
    where = f" (attributes {', '.join(hidden)} cannot be saved)" if hidden else ""
    return (
        f"optimizer.name: '{name}' steps on otherwise from what a commit holds of it{where}: it keeps something where "
        "no commit can find it; keep numbers and tensors in its state, groups or attributes"
    )


MakeOptimizer = Callable[[Sequence[dict[str, Any]]], Optimizer]
_SHORT, _NUM_SHORT, _STEPS = 15, 137, 2
"""Elements of a part too short for a vector, and number of parts: enough to see one difference in thousands."""


def shows_no_cut(make: MakeOptimizer, settings: Mapping[str, Any], device: torch.device | str | None = None) -> bool:
    """Return True if updates of one parameter have the same bits as updates of its small parts."""
    generator = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(1 + _STEPS, _NUM_SHORT * _SHORT, generator=generator).to(device)
    whole = _updated(make, settings, [values], [[gradient] for gradient in gradients])
    parts = _updated(make, settings, values.split(_SHORT), [gradient.split(_SHORT) for gradient in gradients])
    return torch.equal(whole, parts)


def _updated(
    make: MakeOptimizer, settings: Mapping[str, Any], values: Sequence[Tensor], steps: Sequence[Sequence[Tensor]]
) -> Tensor:
    twin = Twin(make, [{**settings, "lr": 0.1}], [values])
    for gradients in steps:
        twin.update(gradients)
    return torch.cat([parameter.detach() for parameter in twin.parameters])
