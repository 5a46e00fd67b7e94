"""One hash for all weights: equal if and only if every weight and buffer is, to the last bit.

It is a hash of the tensors' hashes, and these of their grains' hashes, so that ranks that hold a part each can find
theirs apart. Commits of formats 1 and 2 have a tensor's bytes hashed at once, and so another hash for equal weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from isal.isal_zlib import crc32
from torch import Tensor, nn

from elastic_train.shards.digest import grain_digests, join_grains


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 over all weights and buffers: names in order, dtypes, shapes, bytes."""
    return join_digests({name: _digest_of(tensor) for name, tensor in model.state_dict().items()})


def tensor_digest(dtype: torch.dtype, shape: torch.Size, content: memoryview) -> str:
    """Return the SHA-256 over dtype, shape and the SHA-256s of one tensor's grains, from its bytes."""
    return join_grains(str(dtype), shape, grain_digests(content, dtype.itemsize))


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes: enough to tell ranks apart by accident, in a sixth of SHA-256's time."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return crc32(flat.numpy().data)


def _digest_of(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tensor_digest(tensor.dtype, tensor.shape, flat.numpy().data)


def join_digests(digests: Mapping[str, str]) -> str:
    """Return the SHA-256 of named tensors' digests, in the order of their names."""
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
