"""Column chunks: the byte ranges of a row group that are read, and their checksums.

A chunk is the smallest unit of reading, so its checksum is compared with bytes already in memory, whichever columns are
in use. It is zlib's CRC-32, by an implementation that takes a seventh of the time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO

import pyarrow.parquet as pq
from isal.isal_zlib import crc32

_PIECE = 1 << 20


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
