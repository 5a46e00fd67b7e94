"""Parquet files as this package reads them: the footer once, row groups in the calling thread.

By default pyarrow reads ahead in its own threads, and under an fsspec file these threads run Python. No thread but
the caller's may do that here: one that waits for the interpreter's lock while the interpreter ends is cancelled inside
of C++ code, which can abort a process whose work is done.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_train.data.arrow.plain_types import plain
from elastic_train.errors import DataError

MAGIC = b"PAR1"
ENCRYPTED = b"PARE"
_TAIL_BYTES = 8
_SIGNATURE_BYTES = 28
"""A footer in plain text is signed where columns are encrypted: 12 bytes of nonce, 16 of tag."""
_DECRYPT = "is encrypted, in whole or in some columns; write it again without encryption"
_KEPT_MS = 60_000


def read_footer(file: BinaryIO, size: int, path: str) -> bytes:
    """Read a Parquet file's footer with its length and magic; DataError if the file does not end as one must."""
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
    """Return the SHA-256 of a footer: it holds every column chunk's size, place and statistics."""
    return hashlib.sha256(footer).hexdigest()


def parse_footer(footer: bytes, path: str) -> pq.FileMetaData:
    """Return what a footer says; DataError if it says nothing."""
    try:
        metadata = pq.read_metadata(pa.BufferReader(MAGIC + footer))
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: its footer cannot be read: {error}; copy the file again") from error
    if metadata.serialized_size + _SIGNATURE_BYTES == len(footer) - _TAIL_BYTES:
        raise DataError(f"{path}: {_DECRYPT}")  # to look at an encrypted column would end the process
    return metadata


def open_parquet(file: BinaryIO | io.RawIOBase, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Open a Parquet file that reads nothing ahead; `metadata`, where known, saves reading the footer again."""
    return pq.ParquetFile(file, metadata=metadata, pre_buffer=False)


@functools.cache
def keep_memory() -> None:
    """Have pyarrow keep freed memory for the next row group, unless ARROW_DEFAULT_MEMORY_POOL names a pool.

    Its default gives memory back at once, and to fault fresh pages in can cost more than to decode into them.
    """
    if "ARROW_DEFAULT_MEMORY_POOL" in os.environ:
        return
    with contextlib.suppress(NotImplementedError):  # a build without jemalloc
        pa.set_memory_pool(pa.jemalloc_memory_pool())
        pa.jemalloc_set_decay_ms(_KEPT_MS)
        pa.allocate_buffer(1)  # what is set holds for new arenas: this thread takes the one that is there already


def read_row_group(file: pq.ParquetFile, number: int, columns: list[str] | None = None) -> pa.Table:
    """Read and decode a row group in the calling thread, as columns of plain types."""
    return plain(file.read_row_group(number, columns=columns, use_threads=False))
