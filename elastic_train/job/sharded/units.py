"""Units: which parameters of a model are exchanged together; a block is a unit, the rest of the model is one more."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


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
