"""Write a safetensors file tensor by tensor, with the same bytes as the package's own `save_file`.

`save_file` needs all tensors in memory. The format does not: the size of the header in eight bytes, the header (JSON
with type, shape and offset of every tensor), then the tensors' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO

import torch

from elastic_train.checkpoint.format.stored_tensors import Kind, ReadTensors
from elastic_train.checkpoint.format.torch_frame import bytes_of
from elastic_train.errors import ConfigError

_NAMES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's type names, in file order, which keeps every tensor aligned."""
_ALIGNMENT = 8


def write_safetensors(
    file: IO[bytes], kinds: Mapping[str, Kind], read: ReadTensors, metadata: Mapping[str, str]
) -> None:
    """Write tensors as they are read; raise ConfigError, before writing, for an unsupported type."""
    if wrong := [f"{name} ({kind.dtype})" for name, kind in kinds.items() if kind.dtype not in _NAMES]:
        raise ConfigError(f"safetensors has no type for {', '.join(wrong)}: use --to torch, or --format torch")
    order = {dtype: place for place, dtype in enumerate(_NAMES)}
    names = sorted(kinds, key=lambda name: (order[kinds[name].dtype], name.encode()))
    file.write(_header({name: kinds[name] for name in names}, metadata))
    for tensor in read(names):
        file.write(bytes_of(tensor))
        del tensor  # free it before the next one is read


def _header(kinds: Mapping[str, Kind], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, kind in kinds.items():
        start, end = end, end + kind.num_bytes
        entries[name] = {"dtype": _NAMES[kind.dtype], "shape": list(kind.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    return len(header).to_bytes(8, "little") + header
