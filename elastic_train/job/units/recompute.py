"""Blocks that keep little for their backward pass and compute it again (Chen et al. 2016, section 3.1).

What is computed again has the same bits: torch restores its generators, and here buffers that a forward pass changes
are left as the first pass left them. A model's modules and their names stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
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
    """Return the contexts of the first pass and of the second."""
    if how == "units":
        return contextlib.nullcontext(), _unchanged(block)
    first, second = create_selective_checkpoint_contexts(_KEPT)  # type: ignore[no-untyped-call]
    return first, _both(_unchanged(block), second)


@contextlib.contextmanager
def _both(
    first: contextlib.AbstractContextManager[Any], second: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    with first, second:
        yield


@contextlib.contextmanager
def _unchanged(block: nn.Module) -> Iterator[None]:
    """Leave the block's buffers as they are."""
    kept = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)
