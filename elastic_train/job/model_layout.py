"""The cut of a model's parameters into grains, and what of it ranks compare before they train together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from elastic_train.shards.grains import Cut, CutDims, Layout, Listed, cut_along, lay_out


def store_in_memory_order(model: nn.Module, dims: CutDims) -> None:
    """Let parameters stand in memory in the order of their parts, where they have memory.

    A matrix product may round otherwise for a transposed matrix, so all ranks store them alike, in parts or not.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if dims.get(name) and parameter.untyped_storage().nbytes() >= parameter.nbytes:
            parameter.data = parameter.data.movedim(dims[name], 0).contiguous().movedim(0, dims[name])


def store_in_row_major_order(model: nn.Module, dims: CutDims) -> None:
    """Let parameters stand in memory as other libraries expect it, once nothing is computed with them any more."""
    for name in (name for name, dim in dims.items() if dim):
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.contiguous()


class Laid(NamedTuple):
    """What is laid out of a parameter: all of it, or a part."""

    shape: torch.Size
    cut: Cut | None


def layout_of(
    model: nn.Module,
    optimizer: Optimizer,
    dims: CutDims,
    unit_of: Callable[[str], str] = lambda name: "",
    part_of: Callable[[str, Laid], Laid] = lambda name, whole: whole,
) -> Layout:
    """Lay out all parameters, in the model's order; those that need no gradient are in no parameter group.

    `unit_of` says which unit a parameter's name is in, and `part_of` what is laid out of it.
    """
    return lay_out(_listed(model, optimizer, dims, unit_of, part_of))


def _listed(
    model: nn.Module,
    optimizer: Optimizer,
    dims: CutDims,
    unit_of: Callable[[str], str],
    part_of: Callable[[str, Laid], Laid],
) -> Iterator[Listed]:
    groups = {id(one): number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        group = groups.get(id(parameter)) if parameter.requires_grad else None
        shape, cut = part_of(name, Laid(parameter.shape, cut_along(parameter.shape, dims.get(name))))
        yield Listed(name, tuple(shape), str(parameter.dtype), unit_of(name), group, id(parameter), cut)


def describe_layout(layout: Layout) -> Sequence[str]:
    """Return one line for each parameter; equal lines mean equal grains, in the same order, of the same norm."""
    lines = []
    for tensor in layout.tensors:
        flat = layout.flats[tensor.flat]
        use = "frozen" if flat.group is None else f"in parameter group {flat.group}"
        how = "" if tensor.cut is None else f" cut along {tensor.cut.dim}"
        kind = f"{flat.dtype.removeprefix('torch.')} {list(tensor.shape)}{how}"
        lines.append(f"{' and '.join(tensor.names)} {kind}, {use}, grains from {tensor.first_grain} on")
    return lines
