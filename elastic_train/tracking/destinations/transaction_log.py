"""Read what Weights & Biases has written of a run: its .wandb file, LevelDB's log format of protobuf records.

The package takes values in memory and writes them in blocks from another process, which reports nothing when a disk is
full, and then writes nothing more to that file. So only values read back from the file count as written.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

_BLOCK, _HEADER = 1 << 15, 7
_WHOLE, _FIRST, _LAST = 1, 2, 4


class TransactionLog:
    """The last step of each metric in a run's file; each read continues where the last one ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: dict[str, int] = {}
        """Furthest step of each metric."""
        self._at = _HEADER

    def read(self) -> None:
        """Read what was appended, up to the first incomplete record, after making it durable."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            os.fsync(file.fileno())
            for content in self._records(file.seek(0, os.SEEK_END), file.fileno()):
                self._take(content)

    def _records(self, size: int, descriptor: int) -> Iterator[bytes]:
        at, whole = self._at, b""
        while at + _HEADER <= size:
            if _BLOCK - at % _BLOCK < _HEADER:
                at += _BLOCK - at % _BLOCK
                continue
            _, length, kind = struct.unpack("<IHB", os.pread(descriptor, _HEADER, at))
            if not _WHOLE <= kind <= _LAST or at + _HEADER + length > size:
                return
            whole = (b"" if kind in (_WHOLE, _FIRST) else whole) + os.pread(descriptor, length, at + _HEADER)
            at += _HEADER + length
            if kind in (_WHOLE, _LAST):
                self._at = at
                yield whole

    def _take(self, content: bytes) -> None:
        from wandb.proto.wandb_internal_pb2 import Record

        try:
            record = Record.FromString(content)
        except DecodeError:
            return
        if record.HasField("history"):
            values = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            if (step := values.pop("step", None)) is not None:
                self.steps |= {name: max(int(float(step)), self.steps.get(name, -1)) for name in values}
