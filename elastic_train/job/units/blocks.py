"""Units of a model, whose parameters are exchanged together: one per block, and one for the rest of the model.

Blocks' activations may be recomputed (checkpointing; Chen et al. 2016, section 3.1). The recomputed pass has the same
bits: torch restores its own generators, and this module gives the second pass copies of the buffers, attributes and
numpy and Python generators that the first began with, without undoing the first pass's changes. `comparing_blocks`
finds blocks that change anything else. Modules and their names are unaffected.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from elastic_train.config.combinations import refused
from elastic_train.job.units.generators import beginning_at, host_states, moved_hosts, undisturbed
from elastic_train.parallel.attention.documents import ATTEND

Recompute = Literal["none", "units", "selective"]
_ATEN = torch.ops.aten
_KEPT = [
    operator.default
    for operator in (
        _ATEN.mm,
        _ATEN.addmm,
        _ATEN.bmm,
        _ATEN._scaled_mm,
        _ATEN.convolution,
        _ATEN._scaled_dot_product_flash_attention,
        _ATEN._scaled_dot_product_flash_attention_for_cpu,
        _ATEN._scaled_dot_product_efficient_attention,
        _ATEN._scaled_dot_product_cudnn_attention,
        ATTEND,
    )
]
"""The slowest operations: `selective` keeps their results and recomputes everything else."""


def unit_names(model: nn.Module) -> list[str]:
    """Return the names of a model's blocks: the entries of its outermost `nn.ModuleList`s that have parameters.

    An entry without `forward`, such as a list of a layer's parts, never runs: its entries are blocks in its place.
    """
    return list(_blocks(model, "", is_listed=False))


def _blocks(module: nn.Module, prefix: str, *, is_listed: bool) -> Iterator[str]:
    is_listed |= isinstance(module, nn.ModuleList)
    for name, child in module.named_children():
        if not is_listed or getattr(child.forward, "__func__", None) is nn.Module.forward:
            yield from _blocks(child, f"{prefix}{name}.", is_listed=is_listed)
        elif next(child.parameters(), None) is not None:
            yield f"{prefix}{name}"


def unit_of(name: str, units: list[str]) -> str:
    """Return the unit that a parameter's name is in, "" for the rest."""
    return next((unit for unit in units if name.startswith(f"{unit}.")), "")


@contextlib.contextmanager
def recording_order(model: nn.Module, order: list[str]) -> Iterator[None]:
    """Record the order in which a forward pass runs the blocks: `order` becomes all block names in that order.

    A block that did not run follows its predecessor in the model. Raises ConfigError if a block runs twice, because its
    weights could not be released in between; if its weights are used while it does not run, when they have arbitrary
    values; or if it returns no tensor, whose gradient would begin its backward pass. Results may have other bits than
    outside this context.
    """
    names, ran, running = unit_names(model), list[str](), list[str]()
    order.clear()
    hooks = [model.get_submodule(name).register_forward_pre_hook(partial(_note, ran, running, name)) for name in names]
    hooks += [model.get_submodule(name).register_forward_hook(partial(_end, running, name)) for name in names]
    try:
        with _WhileItRuns(model, names, running):
            yield
    finally:
        for hook in hooks:
            hook.remove()
    twice = next((name for number, name in enumerate(ran) if name in ran[:number]), None)
    if twice is not None:
        what = f"block '{twice}', which runs more than once in a forward pass"
        raise refused("blocks that do not run once each, in one order", what)
    order += _in_order(names, ran)


def _note(ran: list[str], running: list[str], name: str, module: nn.Module, arguments: object) -> None:
    ran.append(name)
    running.append(name)


def _end(running: list[str], name: str, module: nn.Module, arguments: object, made: object) -> None:
    running.clear()
    if not any(isinstance(one, Tensor) for one in tree_leaves(made)):
        what = f"block '{name}', which returns a {type(made).__name__} in which torch finds no tensor"
        raise refused("blocks that do not run once each, in one order", what)


class _WhileItRuns(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that use the weights of a block that is not in `running`."""

    def __init__(self, model: nn.Module, names: list[str], running: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._running = running
        owners: dict[int, set[str]] = {}
        for name, one in model.named_parameters(remove_duplicate=False):
            owners.setdefault(one.untyped_storage()._cdata, set()).add(unit_of(name, names))
        self._owner = {memory: name for memory, units in owners.items() if len(units) == 1 for name in units if name}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if not (func.is_view or name.startswith("aten::new_") or name.endswith("_like")):
            for one in tree_leaves((args, kwargs)):
                is_dense = isinstance(one, Tensor) and one.layout is torch.strided
                owner = self._owner.get(one.untyped_storage()._cdata) if is_dense else None
                if owner is not None and owner not in self._running:
                    what = f"a parameter of block '{owner}' that is used while the block does not run"
                    raise refused("blocks that do not run once each, in one order", what)
        return func(*args, **(kwargs or {}))


def _in_order(names: Sequence[str], ran: Sequence[str]) -> list[str]:
    order = list(ran)
    for place, name in enumerate(names):
        if name not in order:
            order.insert(order.index(names[place - 1]) + 1 if place else 0, name)
    return order


def recompute_blocks(model: nn.Module, how: Recompute) -> None:
    """Make a model's blocks recompute their activations in the backward pass; raise ConfigError if it has no blocks."""
    if how == "none":
        return
    names = unit_names(model)
    if not names:
        raise refused("a model without blocks", f"{type(model).__name__}, which has no blocks")
    quiet = set[type[nn.Module]]()
    for name in names:
        block = model.get_submodule(name)
        block.forward = partial(_run, _Recomputed(name, block, how, quiet), block.forward)


class _Recomputed(NamedTuple):
    """A recomputed block; `quiet` has the classes that do not use numpy's and Python's generators."""

    name: str
    block: nn.Module
    how: Recompute
    quiet: set[type[nn.Module]]


@contextlib.contextmanager
def comparing_blocks() -> Iterator[None]:
    """Within this context, compute the first block of each class twice; raise ConfigError if the bits differ."""
    token = _COMPARED.set(set())
    try:
        yield
    finally:
        _COMPARED.reset(token)


_COMPARED: ContextVar[set[type[nn.Module]] | None] = ContextVar("compared", default=None)
"""Classes of blocks already compared; None if blocks are not compared."""


def _run(one: _Recomputed, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    compared, kind = _COMPARED.get(), type(one.block)
    if compared is None or kind in compared:
        return checkpoint(forward, *arguments, use_reentrant=False, context_fn=partial(_contexts, one), **named)
    compared.add(kind)
    devices = [parameter.device for parameter in one.block.parameters() if parameter.is_cuda][:1]
    drawn = host_states()
    with torch.random.fork_rng(devices, device_type="cuda"), undisturbed(), _as_before(_look(one.block)):
        expected = forward(*arguments, **named)  # its side effects are undone
        if not moved_hosts(drawn):
            one.quiet.add(kind)
    torch.clear_autocast_cache()  # or the first pass would use casts of weights that the second has to make
    found = checkpoint(forward, *arguments, use_reentrant=False, context_fn=partial(_contexts, one), **named)
    if not all(map(same_bits, tree_leaves(expected), tree_leaves(found))):
        what = f"block '{one.name}' ({kind.__name__}), whose results differ when it is computed again"
        raise refused("blocks with other results when computed again", what)
    return found


def _contexts(
    one: _Recomputed,
) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """Return the contexts of the first pass, which is about to begin, and of the second."""
    second: contextlib.AbstractContextManager[Any] = _as_before(_look(one.block))
    if type(one.block) not in one.quiet:
        second = _both(second, beginning_at(host_states()))
    if one.how == "units":
        return contextlib.nullcontext(), second
    keeping, using = create_selective_checkpoint_contexts(_KEPT)  # type: ignore[no-untyped-call]
    return keeping, _both(second, using)


@contextlib.contextmanager
def _both(
    first: contextlib.AbstractContextManager[Any], second: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    with first, second:
        yield


_Look = list[tuple[dict[str, Any], dict[str, Any]]]
"""Namespaces of modules, each with a snapshot of its entries."""


def _look(block: nn.Module) -> _Look:
    """Return a snapshot of the block's buffers and attributes, copying values that a pass may change in place."""
    spaces = [space for module in block.modules() for space in (vars(module), module._buffers)]
    return [(space, _copied(space)) for space in spaces]


_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has, e.g. its parameters and hooks."""
_DEEPEST = 4


def _copied(space: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one if name in _OF_MODULES else _copy(one, _DEEPEST) for name, one in space.items()}


def _copy(value: Any, depth: int) -> Any:
    """Copy a tensor that needs no gradient, an array, a generator, or containers of these up to `depth` levels."""
    if isinstance(value, Tensor):
        return value if value.requires_grad else value.clone()
    if isinstance(value, np.ndarray | np.random.Generator | random.Random):
        return copy.deepcopy(value)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if not depth or not value or type(value) not in (list, tuple, set, dict, deque, OrderedDict, defaultdict):
        return value
    if isinstance(value, dict):
        other = copy.copy(value)
        other.update({key: _copy(one, depth - 1) for key, one in value.items()})
        return other
    items = [_copy(one, depth - 1) for one in value]
    return deque(items, value.maxlen) if isinstance(value, deque) else type(value)(items)


@contextlib.contextmanager
def _as_before(first: _Look) -> Iterator[None]:
    """Restore a block's buffers and attributes from a snapshot within the context, and the current ones after it.

    Tensors are replaced, not overwritten: the backward pass may keep references to those of the second pass.
    """
    left = [dict(space) for space, _ in first]
    for space, before in first:
        _put(space, _copied(before))
    try:
        yield
    finally:
        for (space, _), after in zip(first, left, strict=True):
            _put(space, after)


def _put(space: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Set a namespace's entries in place: modules and their hooks refer to it."""
    for name in [name for name in space if name not in entries]:
        del space[name]
    space.update(entries)


def same_bits(one: object, other: object) -> bool:
    """Return True if two tensors have the same type, shape and bits; anything but a dense tensor passes."""
    if not isinstance(one, Tensor) or one.layout is not torch.strided:
        return True
    if not isinstance(other, Tensor) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.numel():
        return True  # torch does not view every empty tensor as bytes
    return torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))
