"""One hash for all weights: equal if and only if every weight and buffer is bit-identical.

It hashes the tensors' hashes, and these hash their grains' hashes, so that ranks with parts can compute theirs
separately. In formats 1 and 2 a tensor's bytes are hashed at once, hence differently.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import torch
from isal.isal_zlib import crc32
from torch import Tensor, nn

from elastic_train.checkpoint.format.layout import bytes_of
from elastic_train.placement.grains import Cut, CutDims, bounds_of, cut_along, digests_of, join_grains
from elastic_train.placement.norm import in_memory_order

GrainRun = tuple[int, str]
"""Consecutive grains of a tensor: index of the first, and the hex SHA-256s of all, concatenated."""


def weights_digest(model: nn.Module, dims: CutDims) -> str:
    """Return the SHA-256 over all weights and buffers: names in order, dtypes, shapes, bytes."""
    named = model.state_dict().items()
    return join_digests({name: digest_of(tensor, dims.get(name)) for name, tensor in named})


def tensor_digest(dtype: torch.dtype, shape: torch.Size, content: memoryview, cut: Cut | None = None) -> str:
    """Return the SHA-256 over dtype, shape and grain SHA-256s of one tensor, from its bytes in memory order."""
    grains = digests_of(content, dtype.itemsize, bounds_of(tuple(shape), cut))
    return join_grains(str(dtype), shape, cut, grains)


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes: detects differences between ranks in a sixth of SHA-256's time."""
    return crc32(bytes_of(tensor.detach().cpu().contiguous()))


def digest_of(tensor: Tensor, dim: int | None = None) -> str:
    """Return the digest of one tensor, which may be split along `dim`."""
    cut = cut_along(tensor.shape, dim)
    content = bytes_of(in_memory_order(tensor.detach(), cut).cpu())
    return tensor_digest(tensor.dtype, tensor.shape, content, cut)


def join_digests(digests: Mapping[str, str]) -> str:
    """Return the SHA-256 of named tensor digests, in name order."""
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


class GrainRunHash:
    """Hashes consecutive grains of a tensor incrementally, from the one that begins at element `lo`.

    `bounds` are the boundaries of all the tensor's grains.
    """

    def __init__(self, bounds: Sequence[int], lo: int, itemsize: int) -> None:
        self._first = bisect_left(bounds, lo)
        assert bounds[self._first] == lo, f"element {lo} begins no grain"
        self._bounds, self._itemsize = bounds, itemsize
        self._done: list[str] = []
        self._grain, self._num_hashed = hashlib.sha256(), 0

    def update(self, content: memoryview) -> None:
        """Hash the next bytes; they may end anywhere in a grain."""
        rest = content.cast("B")
        while len(rest):
            number = self._first + len(self._done)
            missing = (self._bounds[number + 1] - self._bounds[number]) * self._itemsize - self._num_hashed
            piece, rest = rest[:missing], rest[missing:]
            self._grain.update(piece)
            self._num_hashed += len(piece)
            if len(piece) == missing:
                self._done.append(self._grain.hexdigest())
                self._grain, self._num_hashed = hashlib.sha256(), 0

    def digests(self) -> GrainRun:
        """Return the digests, once all bytes were given."""
        assert not self._num_hashed, "a grain has ended nowhere"
        return self._first, "".join(self._done)


def join_runs(dtype: torch.dtype, shape: torch.Size, cut: Cut | None, runs: Iterable[GrainRun]) -> str:
    """Return a tensor's digest from those of all its grains, whoever hashed them."""
    grains: list[bytes] = []
    for first, digests in sorted(runs):
        assert first == len(grains), f"grain {first} follows {len(grains)} grains"
        joined = bytes.fromhex(digests)
        grains += [joined[at : at + SHA256_BYTES] for at in range(0, len(joined), SHA256_BYTES)]
    expected = len(bounds_of(tuple(shape), cut)) - 1
    assert len(grains) == expected, f"{len(grains)} of {expected} grains of a tensor of shape {tuple(shape)}"
    return join_grains(str(dtype), shape, cut, grains)


SHA256_BYTES = hashlib.sha256().digest_size
