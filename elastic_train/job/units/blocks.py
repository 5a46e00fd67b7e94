"""Units of a model, whose parameters are exchanged together: one per block, and one for the rest of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

from torch import nn

from elastic_train.config.combinations import refused
from elastic_train.parallel.unit_weights import is_in_backward


def unit_names(model: nn.Module) -> list[str]:
    """Return the names of a model's blocks: the entries of its outermost `nn.ModuleList`s that have parameters."""
    return list(_blocks(model, ""))


def _blocks(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        if isinstance(module, nn.ModuleList):
            if next(child.parameters(), None) is not None:
                yield f"{prefix}{name}"
        else:
            yield from _blocks(child, f"{prefix}{name}.")


def unit_of(name: str, units: list[str]) -> str:
    """Return the unit that a parameter's name is in, "" for the rest."""
    return next((unit for unit in units if name.startswith(f"{unit}.")), "")


@contextlib.contextmanager
def recording_order(model: nn.Module, order: list[str]) -> Iterator[None]:
    """Record the order in which a forward pass runs the blocks: `order` becomes all block names in that order.

    A block that did not run follows its predecessor in the model. Raises ConfigError if a block runs twice, because its
    weights could not be released in between.
    """
    names, ran = unit_names(model), list[str]()
    order.clear()
    hooks = [model.get_submodule(name).register_forward_pre_hook(partial(_note, ran, name)) for name in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    twice = next((name for number, name in enumerate(ran) if name in ran[:number]), None)
    if twice is not None:
        what = f"block '{twice}', which runs more than once in a forward pass"
        raise refused("blocks that do not run once each, in one order", what)
    order += _in_order(names, ran)


def _note(ran: list[str], name: str, module: nn.Module, arguments: object) -> None:
    if not is_in_backward():
        ran.append(name)


def _in_order(names: Sequence[str], ran: Sequence[str]) -> list[str]:
    order = list(ran)
    for place, name in enumerate(names):
        if name not in order:
            order.insert(order.index(names[place - 1]) + 1 if place else 0, name)
    return order
