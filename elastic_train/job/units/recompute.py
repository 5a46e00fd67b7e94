"""Blocks that keep little for their backward pass and compute it again (Chen et al. 2016, section 3.1).

What is computed again has the same bits: torch restores its generators, and here the second pass begins with the
buffers and attributes that the first began with, in copies: what the first pass has left stays. A model's modules and
their names stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from elastic_train.errors import ConfigError
from elastic_train.job.units.blocks import unit_names

Recompute = Literal["none", "units", "selective"]
_ATEN = torch.ops.aten
_KEPT = [
    operator.default
    for operator in (
        _ATEN.mm,
        _ATEN.addmm,
        _ATEN.bmm,
        _ATEN.convolution,
        _ATEN._scaled_dot_product_flash_attention,
        _ATEN._scaled_dot_product_flash_attention_for_cpu,
        _ATEN._scaled_dot_product_efficient_attention,
        _ATEN._scaled_dot_product_cudnn_attention,
    )
]
"""What takes most of the time: `selective` keeps what these return, and computes all else again."""


def recompute_blocks(model: nn.Module, how: Recompute) -> None:
    """Let a model's blocks compute again what their backward pass needs; raises ConfigError if it has none."""
    if how == "none":
        return
    names = unit_names(model)
    if not names:
        raise ConfigError(
            f"parallel.recompute: {how} is for a model's blocks, the entries of an nn.ModuleList, and "
            f"{type(model).__name__} has none: set it to none"
        )
    for name in names:
        block = model.get_submodule(name)
        block.forward = partial(_run, block.forward, partial(_contexts, block, how))


def _run(forward: Callable[..., Any], contexts: Callable[[], Any], *arguments: Any, **named: Any) -> Any:
    return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts, **named)


def _contexts(
    block: nn.Module, how: Recompute
) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """Return the contexts of the first pass, which is about to begin, and of the second."""
    second = _as_before(_look(block))
    if how == "units":
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
"""Namespaces of modules, and their entries at one time."""


def _look(block: nn.Module) -> _Look:
    """Return the block's buffers and attributes, the tensors among them copied."""
    spaces = [space for module in block.modules() for space in (vars(module), module._buffers)]
    return [(space, _copied(space)) for space in spaces]


def _copied(space: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries, with copies of tensors that no gradient flows through."""
    return {
        name: one.clone() if isinstance(one, Tensor) and not one.requires_grad else one for name, one in space.items()
    }


@contextlib.contextmanager
def _as_before(first: _Look) -> Iterator[None]:
    """Let a block find the buffers and attributes of an earlier look, and leave those that it has now.

    Nothing is written into tensors: what the second pass keeps of them for the backward pass would change with them.
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
    """Make a namespace hold these entries, in place: modules and their hooks refer to it."""
    for name in [name for name in space if name not in entries]:
        del space[name]
    space.update(entries)
