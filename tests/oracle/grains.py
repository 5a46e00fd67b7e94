"""After docs/arithmetic.md and docs/formats.md alone: trees, the norm by grains, the SHA-256 of the weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import torch

T = TypeVar("T")
GRAIN = 65536


def tree(nodes: list[T], add: Callable[[T, T], T]) -> T:
    while len(nodes) > 1:
        nodes = [add(*nodes[i : i + 2]) if nodes[i + 1 :] else nodes[i] for i in range(0, len(nodes), 2)]
    return nodes[0]


def halves(x: torch.Tensor) -> torch.Tensor:
    while len(x) > 1:
        half = 1 << ((len(x) - 1).bit_length() - 1)
        x = torch.cat([x[: len(x) - half] + x[half:], x[len(x) - half : half]])
    return x


def runs(x: torch.Tensor, dim: int | None) -> list[torch.Tensor]:
    """The elements in memory order, from each edge of a part to the next."""
    first = x.reshape(1, -1) if dim is None else x.movedim(dim, 0)
    edges = {k * len(first) // t for t in range(1, 65) if len(first) % t == 0 for k in range(t + 1)}
    return [first[lo:hi].reshape(-1) for lo, hi in pairwise(sorted(edges)) if x.numel()]


def clip(gradients: list[torch.Tensor], dims: list[int | None], limit: float) -> None:
    grains = [
        halves(grain.double() ** 2)
        for gradient, dim in zip(gradients, dims, strict=True)
        for run in runs(gradient, dim)
        for grain in run.split(GRAIN)
    ]
    factor = limit / (math.sqrt(math.fsum(grains)) + 1e-6)
    for gradient in gradients:
        gradient *= min(1.0, factor)


def digest(model: torch.nn.Module, dims: dict[str, int]) -> str:
    lines = ""
    for name, x in sorted(model.state_dict().items()):
        found = [grain.numpy().tobytes() for run in runs(x, dims.get(name)) for grain in run.split(GRAIN)]
        how = f" cut along {dims[name]}" if name in dims else ""
        head = f"{x.dtype} {tuple(x.shape)}{how} in {len(found)} grains of {GRAIN}\n".encode()
        grains = b"".join(hashlib.sha256(grain).digest() for grain in found)
        lines += f"{name} {hashlib.sha256(head + grains).hexdigest()}\n"
    return hashlib.sha256(lines.encode()).hexdigest()
