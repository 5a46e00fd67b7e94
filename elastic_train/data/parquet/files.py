"""Read Parquet files: the footer once, row groups in the calling thread.

By default pyarrow reads ahead in its own threads, which run Python under an fsspec file. Here only the caller's thread
may do that: a thread that waits for the interpreter's lock while the interpreter ends is cancelled inside C++ code,
which can abort a process whose work is done.

A column chunk is the smallest unit of reading, so its checksum is compared with bytes already in memory, whichever
columns are in use. It is zlib's CRC-32, by an implementation that takes a seventh of the time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from isal.isal_zlib import crc32

from elastic_train.data.arrow.numbers import plain
from elastic_train.errors import DataError

MAGIC = b"PAR1"
ENCRYPTED = b"PARE"
_TAIL_BYTES = 8
_SIGNATURE_BYTES = 28
"""Footers in plain text are signed if columns are encrypted: 12 bytes of nonce, 16 of tag."""
_DECRYPT = "is encrypted, in whole or in some columns; write it again without encryption"
_KEPT_MS = 60_000

_PIECE = 1 << 20


def read_footer(file: BinaryIO, size: int, path: str) -> bytes:
    """Read a Parquet file's footer with length and magic; raise DataError if the file has no valid end."""
    if size < 12:
        raise DataError(f"{path}: {size} bytes are not a Parquet file; it is truncated, copy it again")
    file.seek(size - 8)
    tail = file.read(8)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] == ENCRYPTED:
        raise DataError(f"{path}: {_DECRYPT}")
    if tail[4:] != MAGIC or length + 12 > size:
        raise DataError(f"{path}: does not end as a Parquet file does; it is truncated or damaged, copy it again")
    file.seek(size - 8 - length)
    return file.read(length + 8)


def footer_sha256(footer: bytes | memoryview) -> str:
    """Return the SHA-256 of a footer, which has every column chunk's size, place and statistics."""
    return hashlib.sha256(footer).hexdigest()


def parse_footer(footer: bytes, path: str) -> pq.FileMetaData:
    """Parse a footer; raise DataError if it is invalid."""
    try:
        metadata = pq.read_metadata(pa.BufferReader(MAGIC + footer))
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: its footer cannot be read: {error}; copy the file again") from error
    if metadata.serialized_size + _SIGNATURE_BYTES == len(footer) - _TAIL_BYTES:
        raise DataError(f"{path}: {_DECRYPT}")  # inspecting an encrypted column would end the process
    return metadata


def open_parquet(file: BinaryIO | io.RawIOBase, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Open a Parquet file without read-ahead; `metadata`, if known, saves reading the footer again."""
    return pq.ParquetFile(file, metadata=metadata, pre_buffer=False)


@functools.cache
def keep_memory() -> None:
    """Make pyarrow keep freed memory for the next row group, unless ARROW_DEFAULT_MEMORY_POOL names a pool.

    The default returns memory at once, and faulting in fresh pages can cost more than decoding into them.
    """
    if "ARROW_DEFAULT_MEMORY_POOL" in os.environ:
        return
    with contextlib.suppress(NotImplementedError):  # a build without jemalloc
        pa.set_memory_pool(pa.jemalloc_memory_pool())
        pa.jemalloc_set_decay_ms(_KEPT_MS)
        pa.allocate_buffer(1)  # the setting applies to new arenas: this takes up the existing one


def read_row_group(file: pq.ParquetFile, number: int, columns: list[str] | None = None) -> pa.Table:
    """Read and decode a row group in the calling thread, as columns of plain types."""
    return plain(file.read_row_group(number, columns=columns, use_threads=False))


@dataclass(frozen=True, slots=True)
class Chunk:
    """The bytes [lo, hi) of a file: a row group's values of one column, by its path in the schema.

    `crc32` is their checksum, None if unknown.
    """

    column: str
    lo: int
    hi: int
    crc32: int | None = None

    def __str__(self) -> str:
        return f"bytes [{self.lo}, {self.hi}) of column '{self.column}'"

    def is_of(self, names: Sequence[str]) -> bool:
        """Return True if it belongs to one of the columns; paths of nested columns are longer, names may have dots."""
        return f"{self.column}.".startswith(tuple(f"{name}." for name in names))


def chunks_of(metadata: pq.FileMetaData, group: int, sums: Sequence[int] | None = None) -> list[Chunk]:
    """Return a row group's chunks in schema order, with checksums if given."""
    chunks, found = [], metadata.row_group(group)
    for place in range(found.num_columns):
        column = found.column(place)
        lo = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)))
        crc32 = None if sums is None else sums[place]
        chunks.append(Chunk(column.path_in_schema, lo, lo + column.total_compressed_size, crc32))
    return chunks


def all_chunks(metadata: pq.FileMetaData) -> list[Chunk]:
    """Return a file's chunks, row group by row group."""
    return [chunk for group in range(metadata.num_row_groups) for chunk in chunks_of(metadata, group)]


def digest(file: BinaryIO, chunks: Sequence[Chunk]) -> tuple[str, list[int]]:
    """Read a file once: return the SHA-256 of all its bytes, and the CRC-32 of each chunk."""
    sha256, sums = hashlib.sha256(), [0] * len(chunks)
    waiting = sorted(range(len(chunks)), key=lambda number: chunks[number].lo, reverse=True)
    begun: list[int] = []
    file.seek(0)
    for lo, hi in pairwise(sorted({0, *(bound for chunk in chunks for bound in (chunk.lo, chunk.hi))})):
        while waiting and chunks[waiting[-1]].lo == lo:
            begun.append(waiting.pop())
        begun = [number for number in begun if chunks[number].hi > lo]
        left = hi - lo
        while left and (piece := file.read(min(left, _PIECE))):
            sha256.update(piece)
            for number in begun:
                sums[number] = crc32(piece, sums[number])
            left -= len(piece)
    while piece := file.read(_PIECE):
        sha256.update(piece)
    return sha256.hexdigest(), sums
