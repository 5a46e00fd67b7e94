"""Bitwise equality of results, NaN included, as required of two passes over the same inputs."""

from __future__ import annotations

import torch
from torch import Tensor


def same_bits(one: object, other: object) -> bool:
    """Return True if two tensors have the same type, shape and bits; anything but a dense tensor passes."""
    if not isinstance(one, Tensor) or one.layout is not torch.strided:
        return True
    if not isinstance(other, Tensor) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.numel():
        return True  # torch does not view every empty tensor as bytes
    return torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))
