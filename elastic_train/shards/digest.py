"""Digests of tensors from digests of their grains, so that ranks that hold grains need not gather tensors.

A tensor's digest is the SHA-256 over its dtype, its shape and its grains' SHA-256s. It depends on the tensor alone: not
on flat vectors, units, parameter groups, or on who holds what.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from elastic_train.shards.grains import GRAIN, Layout


def grain_digests(content: memoryview, itemsize: int) -> list[bytes]:
    """Return the SHA-256 of every grain of a tensor, in order, from its bytes; an empty tensor has none."""
    size = GRAIN * itemsize
    flat = content.cast("B")
    return [hashlib.sha256(flat[lo : lo + size]).digest() for lo in range(0, len(flat), size)]


def join_grains(dtype: str, shape: Sequence[int], grains: Sequence[bytes]) -> str:
    """Return a tensor's digest from those of all of its grains, in order."""
    head = f"{dtype} {tuple(shape)} in {len(grains)} grains of {GRAIN}\n"
    return hashlib.sha256(head.encode() + b"".join(grains)).hexdigest()


def tensor_digests(layout: Layout, grains: Mapping[int, bytes]) -> dict[str, str]:
    """Return the digest of every tensor, under each of its names, from those of all grains, by number.

    Raises KeyError for a grain without a digest.
    """
    digests: dict[str, str] = {}
    for tensor in layout.tensors:
        dtype = layout.flats[tensor.flat].dtype
        joined = join_grains(dtype, tensor.shape, [grains[number] for number in tensor.grains])
        digests |= dict.fromkeys(tensor.names, joined)
    return digests
