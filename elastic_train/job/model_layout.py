"""The cut of a model's parameters into grains, and what of it ranks compare before they train together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_train.shards.grains import Layout, Listed, lay_out


def _own_shape(name: str, parameter: Tensor) -> torch.Size:
    return parameter.shape


def layout_of(
    model: nn.Module,
    optimizer: Optimizer,
    unit_of: Callable[[str], str] = lambda name: "",
    shape_of: Callable[[str, Tensor], torch.Size] = _own_shape,
) -> Layout:
    """Lay out all parameters, in the model's order; those that need no gradient are in no parameter group.

    `unit_of` says which unit a parameter's name is in, and `shape_of` the shape of what is laid out of it.
    """
    return lay_out(_listed(model, optimizer, unit_of, shape_of))


def _listed(
    model: nn.Module,
    optimizer: Optimizer,
    unit_of: Callable[[str], str],
    shape_of: Callable[[str, Tensor], torch.Size],
) -> Iterator[Listed]:
    groups = {id(one): number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        group = groups.get(id(parameter)) if parameter.requires_grad else None
        shape = tuple(shape_of(name, parameter))
        yield Listed(name, shape, str(parameter.dtype), unit_of(name), group, id(parameter))


def describe_layout(layout: Layout) -> Sequence[str]:
    """Return one line for each parameter; equal lines mean equal grains, in the same order, of the same norm."""
    lines = []
    for tensor in layout.tensors:
        flat = layout.flats[tensor.flat]
        use = "frozen" if flat.group is None else f"in parameter group {flat.group}"
        kind = f"{flat.dtype.removeprefix('torch.')} {list(tensor.shape)}"
        lines.append(f"{' and '.join(tensor.names)} {kind}, {use}, grains from {tensor.first_grain} on")
    return lines
