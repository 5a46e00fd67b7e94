"""Check that a model can be trained, and lay out its parameters in grains; ranks compare descriptions of the layout."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_train.errors import ConfigError
from elastic_train.placement.grains import Cut, CutDims, Layout, Listed, cut_along, lay_out


def check_model(model: nn.Module) -> None:
    """Refuse a model whose forward pass communicates with other ranks, or whose parameters share memory.

    Its results would depend on the world, or on how the state is sharded. Its state must be tensors, as in commits.
    """
    found = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if found:
        raise ConfigError(
            f"the task's model has SyncBatchNorm ({', '.join(found)}), whose statistics depend on the number of ranks: "
            "use BatchNorm, whose running statistics become the mean over a step's lanes"
        )
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"the task's model has a {type(value).__name__} as '{name}' in its state_dict, and a commit holds its "
                "tensors: let get_extra_state return a tensor, or keep these numbers in buffers"
            )
    check_memory_is_apart(model)


def make_gradients_dense(model: nn.Module) -> None:
    """Make embeddings return dense gradients; refuse any other sparse gradient in its first backward pass.

    A lane's gradient must be added to the sum in one addition. Rows of a sparse gradient are added one by one, so the
    rounding would depend on the number of lanes that a rank has computed.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            _refuse_sparse(name, parameter)


def _refuse_sparse(name: str, parameter: Tensor) -> None:
    def look(gradient: Tensor) -> None:
        handle.remove()
        if gradient.is_sparse:
            raise ConfigError(
                f"the task's model leaves a sparse gradient of '{name}', and here gradients are dense, summed over all "
                "lanes: call torch.nn.functional.embedding without sparse=True"
            )

    handle = parameter.register_hook(look)  # type: ignore[no-untyped-call]


def check_memory_is_apart(model: nn.Module) -> None:
    """Raise ConfigError if a trained parameter shares memory with another parameter or buffer.

    One parameter may have several names. Two parameters that share memory would be updated twice there, and would
    separate once either is stored elsewhere.
    """
    named = {id(one): (name, one) for name, one in (*model.named_buffers(), *model.named_parameters())}
    placed = sorted((one.data_ptr(), name, one) for name, one in named.values() if _fills_its_memory(one))
    last = dict[bool, tuple[int, str]]()  # by whether it is trained: the furthest end so far, and whose it is
    for start, name, one in placed:
        for end, other in (last[is_trained] for is_trained in last if is_trained or one.requires_grad):
            if end > start:
                raise ConfigError(
                    f"the task's model has '{other}' and '{name}' in the same memory, as two tensors: tie them by "
                    "assigning the parameter itself (one.weight = other.weight) and not its data, or clone one of them"
                )
        own = start + one.nbytes, name
        last[one.requires_grad] = max(own, last.get(one.requires_grad, own))


def _fills_its_memory(tensor: Tensor) -> bool:
    """Return True if a tensor has memory and its elements fill it without gaps."""
    if type(tensor.data) is not Tensor or tensor.layout != torch.strided or tensor.device.type == "meta":
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return 0 < tensor.nbytes <= tensor.untyped_storage().nbytes() and last + 1 == tensor.numel()


def store_in_memory_order(model: nn.Module, dims: CutDims) -> None:
    """Store parameters with their cut dimension first in memory, unless they have no memory.

    A matrix product may round differently for a transposed matrix, so all ranks use this order, whether cut or not.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if dims.get(name) and parameter.untyped_storage().nbytes() >= parameter.nbytes:
            parameter.data = parameter.data.movedim(dims[name], 0).contiguous().movedim(0, dims[name])


def store_in_row_major_order(model: nn.Module, dims: CutDims) -> None:
    """Store parameters in row-major order, as other libraries expect, once training is over."""
    for name in (name for name, dim in dims.items() if dim):
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.contiguous()


class Laid(NamedTuple):
    """Shape and cut of a parameter, or of a place's part of it."""

    shape: torch.Size
    cut: Cut | None


def layout_of(
    model: nn.Module,
    optimizer: Optimizer,
    dims: CutDims,
    unit_of: Callable[[str], str] = lambda name: "",
    part_of: Callable[[str, Laid], Laid] = lambda name, whole: whole,
    atomic: Container[int] = (),
) -> Layout:
    """Lay out all parameters, in the model's order; those without gradient are in no parameter group.

    `unit_of` maps a parameter's name to its unit, and `part_of` to the part to lay out; `atomic` has the numbers of the
    parameter groups whose parameters are held whole or not at all.
    """
    return lay_out(_listed(model, optimizer, dims, unit_of, part_of, atomic))


def _listed(
    model: nn.Module,
    optimizer: Optimizer,
    dims: CutDims,
    unit_of: Callable[[str], str],
    part_of: Callable[[str, Laid], Laid],
    atomic: Container[int],
) -> Iterator[Listed]:
    groups = {id(one): number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        group = groups.get(id(parameter)) if parameter.requires_grad else None
        shape, cut = part_of(name, Laid(parameter.shape, cut_along(parameter.shape, dims.get(name))))
        is_atomic = group in atomic
        yield Listed(name, tuple(shape), str(parameter.dtype), unit_of(name), group, id(parameter), cut, is_atomic)


def describe_layout(layout: Layout) -> Sequence[str]:
    """Return one line per parameter; equal lines mean equal grains, in the same order, with the same norm."""
    lines = []
    for tensor in layout.tensors:
        flat = layout.flats[tensor.flat]
        use = "frozen" if flat.group is None else f"in parameter group {flat.group}"
        how = "" if tensor.cut is None else f" cut along {tensor.cut.dim}"
        kind = f"{flat.dtype.removeprefix('torch.')} {list(tensor.shape)}{how}"
        lines.append(f"{' and '.join(tensor.names)} {kind}, {use}, grains from {tensor.first_grain} on")
    return lines
