"""The cut of a model's parameters into grains, and what of it ranks compare before they train together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_train.errors import ConfigError
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


def check_memory(model: nn.Module) -> None:
    """Refuse parameters that shards would lay out otherwise than the model has them: ConfigError.

    In one flat vector each has its own elements, side by side. Kernels round otherwise for other strides, and an update
    of one parameter would no longer reach another that is a view of it.
    """
    taken: list[tuple[int, int, str]] = []
    for name, one in model.named_parameters():
        if not one.is_contiguous():
            raise ConfigError(
                f"'{name}' is not contiguous (strides {list(one.stride())}, as after a transposition or in "
                "channels_last), and shards would make it so, with other bits: make it contiguous in build_model, or "
                "set parallel.shards and parallel.offload to none"
            )
        if one.device.type != "meta" and one.numel() and one.untyped_storage().nbytes():
            taken.append((one.data_ptr(), one.data_ptr() + one.nbytes, name))
    taken.sort()
    for (_, end, first), (begin, _, second) in itertools.pairwise(taken):
        if begin < end:
            raise ConfigError(
                f"'{first}' and '{second}' are two parameters that share memory, and shards would part them: let both "
                "names be one nn.Parameter, or set parallel.shards and parallel.offload to none"
            )


def describe_layout(layout: Layout) -> Sequence[str]:
    """Return one line for each parameter; equal lines mean equal grains, in the same order, of the same norm."""
    lines = []
    for tensor in layout.tensors:
        flat = layout.flats[tensor.flat]
        use = "frozen" if flat.group is None else f"in parameter group {flat.group}"
        kind = f"{flat.dtype.removeprefix('torch.')} {list(tensor.shape)}"
        lines.append(f"{' and '.join(tensor.names)} {kind}, {use}, grains from {tensor.first_grain} on")
    return lines
