"""Equality of results to the last bit, NaN included: what two passes over the same inputs must have."""

from __future__ import annotations

import torch
from torch import Tensor


def same_bits(one: object, other: object) -> bool:
    """Say whether two tensors have the same type, shape and bits; what is no dense tensor passes."""
    if not isinstance(one, Tensor) or one.layout is not torch.strided:
        return True
    if not isinstance(other, Tensor) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.numel():
        return True  # torch does not view every empty tensor as bytes
    return torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))
