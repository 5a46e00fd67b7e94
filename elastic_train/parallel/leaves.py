"""A lane's gradient in transit to its holders: one flat vector at a time, in reused memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from elastic_train.system.huge_pages import on_huge_pages

Shape = tuple[int, tuple[tuple[int, torch.Size, tuple[int, ...]], ...]]
"""Number of elements of a flat vector, and start, shape and stride of its parameters.

Elements between them are zero.
"""


@dataclass(frozen=True, slots=True)
class FlatGradient:
    """One flat vector's parameters, each with its first element."""

    number: int
    numel: int
    parameters: Sequence[tuple[nn.Parameter, int]]
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        places = tuple((start, parameter.shape, parameter.stride()) for parameter, start in self.parameters)
        object.__setattr__(self, "shape", (self.numel, places))


Wire = Literal["exact", "bf16"]
"""Wire format of a leaf, exact or rounded. Rounding depends only on the leaf, so no world affects the sum."""
Units = Sequence[Sequence[FlatGradient]]
"""Gradients to exchange together, in exchange order."""


class Leaf(NamedTuple):
    """A flat vector's memory, and its views in the parameters' shapes."""

    memory: Tensor
    parts: Sequence[Tensor]


class Leaves:
    """Makes leaves from a backward pass's gradients in reused memory: fresh pages cost more than the additions."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._kept: dict[Shape, list[Leaf]] = {}

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which leaves are sent: bf16 if that is narrower."""
        return torch.bfloat16 if self._wire == "bf16" and dtype.itemsize > torch.bfloat16.itemsize else dtype

    def take(self, flat: FlatGradient) -> Leaf:
        """Return a flat vector's leaf in its wire format, and drop its parameters' gradients; it starts from zeros.

        Unused parameters are zero.
        """
        kept = self._kept.get(flat.shape)
        leaf = kept.pop() if kept else self._made(flat)
        for (parameter, _), part in zip(flat.parameters, leaf.parts, strict=True):
            if (gradient := parameter.grad) is None:
                part.zero_()
            else:
                torch.add(gradient, 0.0, out=part)
                parameter.grad = None
        return leaf

    def _made(self, flat: FlatGradient) -> Leaf:
        memory, (_, places) = self._zeros(flat.numel, flat.parameters[0][0]), flat.shape
        return Leaf(memory, [memory[start:].as_strided(shape, strides) for start, shape, strides in places])

    def _zeros(self, numel: int, like: Tensor) -> Tensor:
        return on_huge_pages(torch.empty(numel, dtype=self.dtype_of(like.dtype), device=like.device)).zero_()

    def give_back(self, flat: FlatGradient, leaf: Leaf) -> None:
        """Return a leaf's memory for reuse."""
        self._kept.setdefault(flat.shape, []).append(leaf)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the memory kept for leaves."""
        yield from (leaf.memory for leaves in self._kept.values() for leaf in leaves)

    def clear(self) -> None:
        """Release all memory."""
        self._kept.clear()


class BufferPool:
    """Reusable memory of summands; keeps at most `most` tensors, each large enough for a unit."""

    def __init__(self, most: int) -> None:
        self._kept: list[Tensor] = []
        self._most = most

    def take(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized flat tensor of the same size and device."""
        for place, memory in enumerate(self._kept):
            if memory.numel() >= like.numel() and (memory.dtype, memory.device) == (dtype, like.device):
                return self._kept.pop(place)[: like.numel()]
        return on_huge_pages(torch.empty_like(like, dtype=dtype))

    def give_back(self, tensor: Tensor) -> None:
        """Return memory from `take`, or any other that is no longer read."""
        if len(self._kept) < self._most:
            self._kept.append(tensor if tensor._base is None else tensor._base)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the memory kept for summands."""
        yield from self._kept

    def clear(self) -> None:
        """Release all memory."""
        self._kept.clear()


def forget_gradients(units: Units) -> None:
    """Drop the gradients of an unfinished backward pass."""
    for unit in units:
        for flat in unit:
            for parameter, _ in flat.parameters:
                parameter.grad = None
