"""Decode row groups: only the columns in use, from any thread, and only after comparing checksums.

The bytes around a file's footer are read together with its first row group, so a dataset that changed under its
manifest is rejected by name before a row of it is used, without an extra request. Two threads that open a file at once
may both compare it; nothing else is shared. Column chunks are compared with their checksums in memory before they are
decoded: a flipped bit decodes to other values without an error. Differing ones are read again, in case memory or
transfer was at fault.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
from isal.isal_zlib import crc32

from elastic_train.data.dataset.manifest import FileEntry, Manifest
from elastic_train.data.parquet.files import (
    Chunk,
    chunks_of,
    footer_sha256,
    keep_memory,
    open_parquet,
    read_row_group,
)
from elastic_train.data.parquet.footer import NAME as FOOTERS
from elastic_train.data.parquet.footer import Footer, Footers, cut_footer, read_footers
from elastic_train.data.parquet.sources import Fetched, LocalSource, open_source
from elastic_train.errors import DataError, StorageError, UnreadableError
from elastic_train.system.wording import sdk_errors

_TAIL_BYTES = 64 << 10
_LOADING = threading.Lock()
MAX_DECODERS = 8
_LOG = logging.getLogger(__name__)
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)


def num_decoders() -> int:
    """Return the number of decoding threads: one per core, up to a bound."""
    return min(MAX_DECODERS, len(os.sched_getaffinity(0)))


def check_columns(manifest: Manifest, columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in manifest.columns]
    if missing:
        raise DataError(
            f"{manifest.url}: no column {', '.join(map(repr, missing))}; it has {', '.join(manifest.columns)}"
        )


class RowGroups:
    """The row groups of a dataset, numbered through all its files; picklable, opens nothing before first use."""

    def __init__(self, manifest: Manifest, columns: Sequence[str]) -> None:
        check_columns(manifest, columns)
        keep_memory()
        self._manifest, self._columns = manifest, list(columns)
        self._source = open_source(manifest.url)
        self._decoders: ThreadPoolExecutor | None = None
        self._loaded: tuple[Footers | None] | None = None
        self._cut: dict[int, Footer] = {}
        self._compared: set[int] = set()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_decoders": None, "_loaded": None, "_cut": {}, "_compared": set()}

    @property
    def is_remote(self) -> bool:
        """True if threads that call `decode` mostly wait for a network."""
        return not isinstance(self._source, LocalSource)

    def decode(self, group: int) -> pa.Table:
        """Return the rows of a row group; raise UnreadableError with the file, or a plain DataError if the file
        changed.

        Raise StorageError if no file can be opened at all, which says nothing about this one.
        """
        number, within = self._manifest.place_of_group(group)
        entry = self._manifest.files[number]
        try:
            table = self._decode(number, entry, within)
        except FileNotFoundError as error:
            raise UnreadableError(f"{self._path(entry)}: cannot be opened: {error}") from error
        except (pa.ArrowInvalid, OSError) as error:
            if isinstance(error, OSError) and error.errno in _NO_MORE_FILES:
                raise StorageError(
                    f"{self._path(entry)}: cannot be opened ({error.strerror}): the data may be whole, but this "
                    "process can open no file at all; raise its limit of open files (ulimit -Hn)"
                ) from error
            raise UnreadableError(
                f"{self._path(entry)}: row group {within} cannot be read ({error}); "
                "check with `elastic-train data verify`, and restore the file if it is damaged"
            ) from error
        if len(table) != entry.row_groups[within]:
            raise UnreadableError(
                f"{self._path(entry)}: row group {within} has {len(table)} rows, the manifest says "
                f"{entry.row_groups[within]}; check with `elastic-train data verify`"
            )
        return table

    def _decode(self, number: int, entry: FileEntry, within: int) -> pa.Table:
        footer = self._footer(number, entry)
        metadata = footer.metadata_of(within, entry.row_groups[within])
        chunks = [chunk for chunk in chunks_of(metadata, 0, footer.sums_of(within)) if chunk.is_of(self._columns)]
        ranges = [(chunk.lo, chunk.hi) for chunk in chunks]
        if number in self._compared:
            file = self._source.open(entry.path, ranges)
        else:
            tail = (entry.size - footer.size, entry.size + 1)  # one byte more, to detect a longer file
            file = self._source.open(entry.path, [*ranges, tail])
            self._compare(entry, file.part(*tail))
            self._compared.add(number)
        if _damaged(file, chunks):
            file = self._source.open(entry.path, ranges, is_again=True)
            self._refuse(entry, within, _damaged(file, chunks))
        return self._read(file, metadata)

    def _refuse(self, entry: FileEntry, within: int, damaged: Sequence[Chunk]) -> None:
        """Raise UnreadableError if a row group's second reading differs from the checksums as well."""
        where = f"{self._path(entry)}: row group {within}"
        if damaged:
            raise UnreadableError(
                f"{where} is damaged: {' and '.join(map(str, damaged))} differ from what was written, also when "
                "read again; restore the file from a copy (`elastic-train data verify` lists all damage)"
            )
        _LOG.warning(
            "%s differed from its checksums, and was whole when it was read again: check this machine's memory, and "
            "its way to the storage",
            where,
        )

    def _read(self, file: Fetched, metadata: pq.FileMetaData) -> pa.Table:
        """Decode a row group; if many threads wait for a network, in one of a few threads that only decode.

        Decoding threads keep their memory, so one per core suffices.
        """
        if not self.is_remote:
            return self._read_here(file, metadata)
        with _LOADING:
            self._decoders = self._decoders or ThreadPoolExecutor(num_decoders(), "decode-fetched")
        return self._decoders.submit(self._read_here, file, metadata).result()

    def _read_here(self, file: Fetched, metadata: pq.FileMetaData) -> pa.Table:
        with file:
            return read_row_group(open_parquet(file, metadata), 0, self._columns)

    def _footer(self, number: int, entry: FileEntry) -> Footer:
        """Return a file's footer: from the footer index, else from the file itself.

        An index whose storage fails is tried again with the next row group.
        """
        if number in self._cut:
            return self._cut[number]
        footers = self._footers()
        if footers is not None and number < len(footers):
            footer = footers[number]
            if number in self._compared or footer.sha256 == entry.footer_sha256:
                return footer
        footer = cut_footer(self._read_footer(entry), entry.path)
        if self._loaded is not None:
            self._cut[number] = footer
        return footer

    def _footers(self) -> Footers | None:
        with _LOADING:  # all decoding threads arrive here first at the same time
            if self._loaded is None:
                try:
                    self._loaded = (read_footers(self._manifest.url),)
                except sdk_errors(OSError) as error:
                    _warn_unread(self._manifest.url, str(error))
                    return None
                if not (self._loaded[0] and self._loaded[0].have_sums):
                    _warn_unchecked(self._manifest.url)
            return self._loaded[0]

    def _read_footer(self, entry: FileEntry) -> bytes:
        """Read a file's own footer, in one request if it is not very long."""
        end = entry.size
        tail = self._source.read(entry.path, max(0, end - _TAIL_BYTES), end)
        length = int.from_bytes(tail[-8:-4], "little") + 8
        if length > len(tail) and length < end:
            tail = self._source.read(entry.path, end - length, end)
        self._compare(entry, tail[-length:])
        return tail[-length:]

    def _compare(self, entry: FileEntry, footer: bytes | memoryview) -> None:
        """Refuse a file whose last bytes are not the footer that the manifest knows."""
        if footer_sha256(footer) == entry.footer_sha256:
            return
        size = self._source.size(entry.path)
        if size < entry.size:
            raise UnreadableError(f"{self._path(entry)}: is truncated: {size} bytes of {entry.size}; copy it again")
        raise DataError(
            f"{self._path(entry)}: the file changed since the manifest was made; "
            "restore it, or build the manifest again and start another run"
        )

    def _path(self, entry: FileEntry) -> str:
        return f"{self._manifest.url.rstrip('/')}/{entry.path}"


def _damaged(file: Fetched, chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks whose bytes differ from their checksums."""
    return [chunk for chunk in chunks if chunk.crc32 not in (None, crc32(file.part(chunk.lo, chunk.hi)))]


@functools.cache
def _warn_unread(url: str, why: str) -> None:
    _LOG.warning("%s: %s cannot be read (%s): row groups are read unchecked until it can", url, FOOTERS, why)


@functools.cache
def _warn_unchecked(url: str) -> None:
    """Log, once per process, that a dataset has no checksums to compare reads with."""
    _LOG.warning(
        "%s: has no checksums of its row groups, so damage in them may not be noticed; "
        "add them with `elastic-train data verify %s --add-checksums`",
        url,
        url,
    )
