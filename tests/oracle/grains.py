"""After docs/arithmetic.md and docs/formats.md alone: trees, the norm by grains, the SHA-256 of the weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
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


def clip(gradients: list[torch.Tensor], limit: float) -> None:
    grains = [halves(x.double() ** 2) for g in gradients for x in g.reshape(-1).split(GRAIN) if len(x)]
    factor = limit / (math.sqrt(tree(grains, lambda a, b: a + b)) + 1e-6)
    for gradient in gradients:
        gradient *= min(1.0, factor)


def digest(model: torch.nn.Module) -> str:
    lines = ""
    for name, x in sorted(model.state_dict().items()):
        content, size = x.numpy().tobytes(), GRAIN * x.element_size()
        grains = [hashlib.sha256(content[at : at + size]).digest() for at in range(0, len(content), size)]
        head = f"{x.dtype} {tuple(x.shape)} in {len(grains)} grains of {GRAIN}\n".encode()
        lines += f"{name} {hashlib.sha256(head + b''.join(grains)).hexdigest()}\n"
    return hashlib.sha256(lines.encode()).hexdigest()
