"""A lane's gradient on its way to its holders: one flat vector after the other, in memory that is used again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from elastic_train.system.huge_pages import on_huge_pages

Shape = tuple[int, tuple[tuple[int, torch.Size, tuple[int, ...]], ...]]
"""The elements of a flat vector, and where its parameters begin, with their shapes and strides: elements between them
are zero."""


@dataclass(frozen=True, slots=True)
class FlatGradient:
    """One flat vector's parameters, each with the element that it begins with."""

    number: int
    numel: int
    parameters: Sequence[tuple[nn.Parameter, int]]
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        places = tuple((start, parameter.shape, parameter.stride()) for parameter, start in self.parameters)
        object.__setattr__(self, "shape", (self.numel, places))


Wire = Literal["exact", "bf16"]
"""How a leaf is sent: as it is, or rounded. That is a function of the leaf, so no world shows in the sum."""
Units = Sequence[Sequence[FlatGradient]]
"""What is exchanged together, in the order of the exchange."""


class Leaf(NamedTuple):
    """A flat vector's memory, and views of it that have the parameters' shapes."""

    memory: Tensor
    parts: Sequence[Tensor]


class Leaves:
    """Makes leaves of the gradients that a backward pass leaves; fresh pages would cost more than the additions."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._kept: dict[Shape, list[Leaf]] = {}

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return what leaves of a type are sent as: bf16 if that is narrower."""
        return torch.bfloat16 if self._wire == "bf16" and dtype.itemsize > torch.bfloat16.itemsize else dtype

    def take(self, flat: FlatGradient) -> Leaf:
        """Return a flat vector's leaf as it is sent, and forget its parameters' gradients; it starts from zeros.

        What no lane uses is zero.
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
        """Take a leaf's memory for the next one of its shape."""
        self._kept.setdefault(flat.shape, []).append(leaf)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the memory that waits for the next leaves."""
        yield from (leaf.memory for leaves in self._kept.values() for leaf in leaves)

    def clear(self) -> None:
        """Let go of all memory."""
        self._kept.clear()


class BufferPool:
    """Memory of summands that were added, for the next ones; at most so many, as each was large enough for a unit."""

    def __init__(self, most: int) -> None:
        self._kept: list[Tensor] = []
        self._most = most

    def take(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of the same size, on the same device, with any values."""
        for place, memory in enumerate(self._kept):
            if memory.numel() >= like.numel() and (memory.dtype, memory.device) == (dtype, like.device):
                return self._kept.pop(place)[: like.numel()]
        return on_huge_pages(torch.empty_like(like, dtype=dtype))

    def give_back(self, tensor: Tensor) -> None:
        """Take memory that `take` has returned, or any other that is not read any more."""
        if len(self._kept) < self._most:
            self._kept.append(tensor if tensor._base is None else tensor._base)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the memory that waits for the next summands."""
        yield from self._kept

    def clear(self) -> None:
        """Let go of all memory."""
        self._kept.clear()


def forget_gradients(units: Units) -> None:
    """Let go of what an unfinished backward pass has left."""
    for unit in units:
        for flat in unit:
            for parameter, _ in flat.parameters:
                parameter.grad = None
