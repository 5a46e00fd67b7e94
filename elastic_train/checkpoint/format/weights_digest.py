"""One hash for all weights: equal if and only if every weight and buffer is, to the last bit.

It is a hash of the tensors' hashes, and these of their grains' hashes, so that ranks that hold a part each can find
theirs apart. Commits of formats 1 and 2 have a tensor's bytes hashed at once, and so another hash for equal weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from isal.isal_zlib import crc32
from torch import Tensor, nn

from elastic_train.checkpoint.format.torch_frame import bytes_of
from elastic_train.shards.digest import grain_digests, join_grains
from elastic_train.shards.grains import GRAIN

GrainRun = tuple[int, str]
"""Neighbouring grains of a tensor: the number of the first, and the SHA-256s of all, in hex, one after the other."""


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 over all weights and buffers: names in order, dtypes, shapes, bytes."""
    return join_digests({name: digest_of(tensor) for name, tensor in model.state_dict().items()})


def tensor_digest(dtype: torch.dtype, shape: torch.Size, content: memoryview) -> str:
    """Return the SHA-256 over dtype, shape and the SHA-256s of one tensor's grains, from its bytes."""
    return join_grains(str(dtype), shape, grain_digests(content, dtype.itemsize))


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes: enough to tell ranks apart by accident, in a sixth of SHA-256's time."""
    return crc32(bytes_of(tensor.detach().cpu().contiguous()))


def digest_of(tensor: Tensor) -> str:
    """Return the digest of one tensor."""
    return tensor_digest(tensor.dtype, tensor.shape, bytes_of(tensor.detach().cpu().contiguous()))


def join_digests(digests: Mapping[str, str]) -> str:
    """Return the SHA-256 of named tensors' digests, in the order of their names."""
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


class GrainRunHash:
    """Hashes neighbouring grains of a tensor from their bytes as they come; `lo` is the first grain's first element."""

    def __init__(self, lo: int, itemsize: int) -> None:
        assert lo % GRAIN == 0, f"element {lo} begins no grain"
        self._first, self._grain_bytes = lo // GRAIN, GRAIN * itemsize
        self._done: list[str] = []
        self._grain, self._num_hashed = hashlib.sha256(), 0

    def update(self, content: memoryview) -> None:
        """Hash the bytes that follow; they may end anywhere in a grain."""
        rest = content.cast("B")
        while len(rest):
            piece, rest = rest[: self._grain_bytes - self._num_hashed], rest[self._grain_bytes - self._num_hashed :]
            self._grain.update(piece)
            self._num_hashed += len(piece)
            if self._num_hashed == self._grain_bytes:
                self._end_grain()

    def digests(self) -> GrainRun:
        """Return the digests, once all bytes have come; only a tensor's last grain is shorter than the others."""
        if self._num_hashed:
            self._end_grain()
        return self._first, "".join(self._done)

    def _end_grain(self) -> None:
        self._done.append(self._grain.hexdigest())
        self._grain, self._num_hashed = hashlib.sha256(), 0


def join_runs(dtype: torch.dtype, shape: torch.Size, runs: Iterable[GrainRun]) -> str:
    """Return a tensor's digest from those of all of its grains, whoever has hashed which."""
    grains: list[bytes] = []
    for first, digests in sorted(runs):
        assert first == len(grains), f"grain {first} follows {len(grains)} grains"
        joined = bytes.fromhex(digests)
        grains += [joined[at : at + _SHA256_BYTES] for at in range(0, len(joined), _SHA256_BYTES)]
    assert len(grains) == -(-shape.numel() // GRAIN), f"{len(grains)} grains of a tensor of shape {tuple(shape)}"
    return join_grains(str(dtype), shape, grains)


_SHA256_BYTES = hashlib.sha256().digest_size
