"""Compute the hash of exported weights with torch and safetensors alone, as docs/formats.md describes it.

python examples/hash_of_weights.py FILE      # a file that `elastic-train export` has written
"""

from __future__ import annotations

import hashlib
import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import safe_open


def digest_of(tensor: torch.Tensor, dim: int | None) -> str:
    """Return the SHA-256 over dtype, shape and the SHA-256s of the tensor's grains."""
    first = tensor.reshape(1, -1) if dim is None else tensor.movedim(dim, 0)
    size, how = first.shape[0], "" if dim is None else f" cut along {dim}"
    edges = sorted({k * size // degree for degree in range(1, 65) if size % degree == 0 for k in range(degree + 1)})
    parts = [first[lo:hi].reshape(-1) for lo, hi in pairwise(edges) if tensor.numel()]
    copies = [grain.clone(memory_format=torch.contiguous_format) for part in parts for grain in part.split(65536)]
    grains = [grain.view(torch.uint8).numpy().tobytes() for grain in copies]
    head = f"{tensor.dtype} {tuple(tensor.shape)}{how} in {len(grains)} grains of 65536\n".encode()
    return hashlib.sha256(head + b"".join(hashlib.sha256(grain).digest() for grain in grains)).hexdigest()


def hash_of(path: Path) -> str:
    """Return the SHA-256 of the lines of all tensors, in the order of their names."""
    with safe_open(path, "pt") as file:
        dims = json.loads(file.metadata()["cut_dims"])
        lines = [f"{name} {digest_of(file.get_tensor(name), dims.get(name))}\n" for name in sorted(file.keys())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


if __name__ == "__main__":
    sys.stdout.write(f"{hash_of(Path(sys.argv[1]))}\n")
