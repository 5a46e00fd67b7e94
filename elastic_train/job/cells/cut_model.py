"""A model cut for tensor parallelism (Shoeybi et al. 2019): each place of a cell keeps rows or columns of its matrices.

A task's plan says what becomes of which module. The parameters stay the same objects, with less in them, so optimizer
and hooks need not know; what the places exchange is in hooks around the modules. Parameters that are not cut are whole
on every place, and get the same gradient there, to the last bit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from elastic_train.errors import ConfigError
from elastic_train.parallel.cells.links import CellLinks, shared, summed
from elastic_train.tasks.task import Splitting, Task, TensorPlan

_DIMENSION = {"column": 0, "row": 1}
"""Which dimension is cut of a linear layer's weight, (outputs, inputs): its transpose is what has columns and rows."""


def check_is_splitting(task: Task, degree: int) -> None:
    """Raise ConfigError if ranks are to hold parts of a model, and its task does not say which."""
    if degree > 1 and not isinstance(task, Splitting):
        raise ConfigError(
            f"parallel.tensor: {degree} needs a task that says how its model is cut, and {type(task).__name__} does "
            "not (`tensor_plan`): set it to 1, or use parallel.shards to hold less on each rank"
        )


def tensor_plan_of(task: Task, model: nn.Module, degree: int) -> TensorPlan | None:
    """Return the plan of a task for its model, with full names; None for a degree of 1.

    Raises ConfigError if the task has none, or the model cannot be cut so often.
    """
    if degree == 1:
        return None
    check_is_splitting(task, degree)
    assert isinstance(task, Splitting), "it was checked"
    patterns = task.tensor_plan(model, degree)
    modules = dict(model.named_modules())
    plan = {name: use for pattern, use in patterns.items() for name in modules if _is_like(name, pattern)}
    for name, use in plan.items():
        if use != "shared":
            _check_linear(name, modules[name], use, degree)
    return plan


def _is_like(name: str, pattern: str) -> bool:
    """Say whether a module's name fits a pattern, in which * stands for one part of a name."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def _check_linear(name: str, module: nn.Module, use: str, degree: int) -> None:
    if not isinstance(module, nn.Linear) or (use == "row" and module.bias is not None):
        kind = "a linear layer with a bias" if isinstance(module, nn.Linear) else f"a {type(module).__name__}"
        raise ConfigError(f"the task's tensor_plan cuts '{name}' by {use}s, which {kind} cannot be")
    if module.weight.shape[_DIMENSION[use]] % degree:
        raise ConfigError(
            f"parallel.tensor: {degree} does not divide the {module.weight.shape[_DIMENSION[use]]} {use}s of '{name}'"
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is cut, by the name that the model lists: along `dim`, from `shape` into `degree` equal parts."""

    dim: int
    shape: torch.Size
    degree: int

    @property
    def part_shape(self) -> torch.Size:
        """The shape of each part."""
        return torch.Size(size // self.degree if dim == self.dim else size for dim, size in enumerate(self.shape))

    def part_of(self, whole: Tensor, place: int) -> Tensor:
        """Return the part of a whole tensor that a place has, in memory of its own."""
        length = self.part_shape[self.dim]
        return whole.narrow(self.dim, place * length, length).clone(memory_format=torch.contiguous_format)


class CutModel:
    """A model and its cuts; whole until `take_place`."""

    def __init__(self, model: nn.Module, plan: TensorPlan, degree: int, links: CellLinks) -> None:
        self.model, self.links = model, links
        self.place: int | None = None
        self._plan, self._hooks = plan, list[RemovableHandle]()
        cuts: dict[int, Cut] = {}
        for name, use in plan.items():
            if use != "shared":
                layer = model.get_submodule(name)
                assert isinstance(layer, nn.Linear), "the plan was checked"
                cuts[id(layer.weight)] = Cut(_DIMENSION[use], layer.weight.shape, degree)
                if layer.bias is not None:
                    cuts[id(layer.bias)] = Cut(0, layer.bias.shape, degree)
        self.cuts: Mapping[str, Cut] = {
            name: cuts[id(one)] for name, one in model.named_parameters(remove_duplicate=False) if id(one) in cuts
        }
        """By each name of every parameter that is cut."""
        self.outline: Mapping[str, Tensor] = {
            name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()
        }
        """All weights and buffers as they are in a whole model, without memory."""

    def take_place(self, place: int, whole: Mapping[str, Tensor] | None = None) -> None:
        """Keep the part of a place, of the weights that are there or of those given, and begin to exchange."""
        assert (self.place is None) or whole is not None, "a part is not cut again"
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        done: set[int] = set()
        with torch.no_grad():
            for name, tensor in (whole or self.model.state_dict()).items():
                if name in self.cuts and id(parameters[name]) not in done:
                    done.add(id(parameters[name]))
                    parameters[name].grad = None
                    parameters[name].data = self.cuts[name].part_of(tensor, place)
                elif whole is not None and name not in self.cuts:
                    self.model.state_dict()[name].copy_(tensor)
        self.place = place
        if not self._hooks:
            self._hooks = [hook for name, use in self._plan.items() for hook in self._hooks_of(name, use)]

    def become_whole(self) -> None:
        """Make every parameter whole again, and exchange no more; all places of the cell call it."""
        parameters = dict(self.model.named_parameters())
        for name in self.cuts:
            if name in parameters:
                parameters[name].grad = None
                parameters[name].data = self.whole(name, parameters[name])
        while self._hooks:
            self._hooks.pop().remove()

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole of a cut parameter, or of another tensor of its shape; all places of the cell call it."""
        return self.links.join(tensor, self.cuts[name].dim)

    def _hooks_of(self, name: str, use: str) -> list[RemovableHandle]:
        module, links = self.model.get_submodule(name), self.links
        if use == "shared":
            return [module.register_forward_pre_hook(partial(_share_input, links))]
        return [module.register_forward_hook(partial(_sum_output, links))] if use == "row" else []


def _share_input(links: CellLinks, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (shared(arguments[0], links), *arguments[1:])


def _sum_output(links: CellLinks, module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return summed(output, links)
