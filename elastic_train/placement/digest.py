"""Digests of tensors from digests of their grains, so that sharded tensors need not be gathered.

A tensor's digest is the SHA-256 over its dtype, shape, cut dimension if any, and its grains' SHA-256s. It depends on
the tensor alone: not on flat vectors, units, parameter groups, degrees or holders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from elastic_train.placement.grains import GRAIN, Cut, Layout


def digests_of(content: memoryview, itemsize: int, bounds: Sequence[int]) -> list[bytes]:
    """Return the SHA-256 of every grain, in order; `content` is in memory order, `bounds` in elements."""
    flat = content.cast("B")
    return [hashlib.sha256(flat[lo * itemsize : hi * itemsize]).digest() for lo, hi in pairwise(bounds)]


def join_grains(dtype: str, shape: Sequence[int], cut: Cut | None, grains: Iterable[bytes]) -> str:
    """Return a tensor's digest from those of all of its grains, in order."""
    found = list(grains)
    how = "" if cut is None else f" cut along {cut.dim}"
    head = f"{dtype} {tuple(shape)}{how} in {len(found)} grains of {GRAIN}\n"
    return hashlib.sha256(head.encode() + b"".join(found)).hexdigest()


def tensor_digests(layout: Layout, grains: Mapping[int, bytes]) -> dict[str, str]:
    """Return the digest of every tensor, under each of its names, from those of all grains, by number.

    Raises KeyError for a grain without a digest.
    """
    digests: dict[str, str] = {}
    for tensor in layout.tensors:
        dtype = layout.flats[tensor.flat].dtype
        joined = join_grains(dtype, tensor.shape, tensor.cut, (grains[number] for number in tensor.grains))
        digests |= dict.fromkeys(tensor.names, joined)
    return digests
