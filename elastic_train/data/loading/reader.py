"""Read rows by sample id, through any fsspec URL, caching the last decoded row groups.

`read` also returns ids rebuilt from row group and row, so that the coverage sums prove what was read, not what was
requested. Row groups and ids are of one dataset, or of several numbered consecutively.

`RowCache` keeps decoded row groups in a folder of the node, memory-mapped by all its processes, across restarts. An
entry is an Arrow stream with a trailer, written under another name and renamed, so a killed process leaves no torn
entry. A machine that goes down can, and a disk may corrupt one: every entry is compared with its checksum before use,
and a damaged one counts as missing. One process decodes a row group while the others wait for it.

Invariant: entries of all datasets take at most half of the disk, or `max_bytes`, in total; the least recently used are
deleted first. An entry's modification time is that of its last use. Bytes are counted in a file before an entry is
written, never too low, and recounted when they seem too many.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import logging
import mmap
import os
import re
import shutil
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import tenacity
from isal.isal_zlib import crc32

from elastic_train.core.arrays import Int64s, group_of
from elastic_train.data.arrow.columns import Rows, gather
from elastic_train.data.dataset.manifest import Manifest, check_there
from elastic_train.data.dataset.row_groups import RowGroups
from elastic_train.errors import UnreadableError
from elastic_train.system.files import is_locked, locked
from rendezvous.pauses import RandomExponential

TRIES, FIRST_PAUSE_S = 3, 0.05

SLACK = 16
"""An eviction frees an extra 1/SLACK, since scanning the folder is slow."""

_FORMAT = b"rows 2\0\0"
_TRAILER = struct.Struct("<QQ8s")  # number of bytes before it, their CRC-32, format
_COUNT, _LOCKS, _NAME, _PARTIAL = "bytes", "locks", ".rows", ".partial"
_ENTRY = re.compile(rf"[0-9a-f]{{32}}/[0-9]+({re.escape(_NAME)}|{re.escape(_PARTIAL)})")
_LOG = logging.getLogger(__name__)


class RowSource(Protocol):
    """A source of row groups; picklable."""

    @property
    def first_id(self) -> Int64s:
        """The id of each row group's first sample; shape (row groups,)."""

    @property
    def digest(self) -> str:
        """Identifies its rows among datasets."""

    @property
    def is_remote(self) -> bool:
        """True if decoding threads mostly wait for a network."""

    def decode(self, group: int) -> Rows:
        """Return the rows of a row group; thread-safe. Raise UnreadableError."""

    def rows_of(self, group: int) -> Rows:
        """Return the rows of a row group, cached; for one thread only."""

    def place_of(self, sample: int) -> str:
        """Return a description of a sample's dataset and file, for a message."""


class Reader:
    """Reads rows of one dataset; picklable, opens files on first use.

    Only `columns` are read. `max_row_groups` bounds the decoded row groups that `read` caches; `cache`, for the same
    manifest and columns, shares them between all processes of the node. Raise DataError if a file has changed since the
    manifest was made, UnreadableError (a DataError) if it is missing or damaged, after several tries.
    """

    def __init__(
        self, manifest: Manifest, columns: Sequence[str], *, max_row_groups: int = 64, cache: RowCache | None = None
    ) -> None:
        self.groups = RowGroups(manifest, columns)
        self._cache, self._manifest = cache, manifest
        self.digest = manifest.digest
        self.first_id, self.num_rows = manifest.group_first_id, manifest.num_rows
        self._max_row_groups = max_row_groups
        self._rows: OrderedDict[int, Rows] = OrderedDict()

    @property
    def is_remote(self) -> bool:
        return self.groups.is_remote

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_rows": OrderedDict()}

    def read(self, ids: Int64s) -> tuple[pa.Table, Int64s]:
        """Return the rows of `ids`, shape (n,), in order, and the ids of the places that were read."""
        return gather(self.rows_of, self.first_id, ids)

    def decode(self, group: int) -> Rows:
        """Return the rows of a row group; thread-safe. Failed reads are retried a few times.

        Raise AwayError if the manifest cannot be read, either.
        """
        decode = partial(_again, self.groups.decode)
        try:
            return Rows(self._cache.get(group, decode) if self._cache else decode(group))
        except UnreadableError:
            check_there(self._manifest.url)
        return Rows(self.groups.decode(group))  # the storage may just have come back

    def rows_of(self, group: int) -> Rows:
        """Return the rows of a row group, cached; for one thread only."""
        rows = self._rows.pop(group, None)
        if rows is None:
            rows = self.decode(group)
            while len(self._rows) >= self._max_row_groups:
                self._rows.popitem(last=False)
        self._rows[group] = rows
        return rows

    def place_of(self, sample: int) -> str:
        return self._manifest.place_of_sample(sample)


class MixedReader:
    """Reads several datasets with consecutively numbered row groups; all readers have the same columns."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers
        self.digest = " ".join(reader.digest for reader in readers)
        sizes = np.array([len(reader.first_id) for reader in readers])
        self._first_group = np.cumsum(sizes) - sizes
        rows = np.array([reader.num_rows for reader in readers])
        firsts = np.cumsum(rows) - rows
        self.first_id = np.concatenate([reader.first_id + lo for reader, lo in zip(readers, firsts, strict=True)])

    @property
    def is_remote(self) -> bool:
        return any(reader.is_remote for reader in self._readers)

    def decode(self, group: int) -> Rows:
        number, within = self._place_of(group)
        return self._readers[number].decode(within)

    def rows_of(self, group: int) -> Rows:
        number, within = self._place_of(group)
        return self._readers[number].rows_of(within)

    def place_of(self, sample: int) -> str:
        number, _ = self._place_of(group_of(self.first_id, sample))
        return self._readers[number].place_of(sample - int(self.first_id[self._first_group[number]]))

    def _place_of(self, group: int) -> tuple[int, int]:
        """Return the dataset of a row group, and its number there."""
        number = group_of(self._first_group, group)
        return number, group - int(self._first_group[number])


_again = tenacity.Retrying(
    retry=tenacity.retry_if_exception_type(UnreadableError),
    stop=tenacity.stop_after_attempt(TRIES),
    wait=RandomExponential(multiplier=FIRST_PAUSE_S),
    reraise=True,
)


class RowCache:
    """Decoded row groups of one dataset and some of its columns; picklable, thread-safe."""

    def __init__(self, folder: Path, manifest: Manifest, columns: Sequence[str], max_bytes: int | None = None) -> None:
        key = hashlib.sha256("\0".join((manifest.digest, *columns)).encode()).hexdigest()[:32]
        self._root, self._folder, self._own_max_bytes = folder, folder / key, max_bytes
        self._is_broken = False

    def get(self, group: int, decode: Callable[[int], pa.Table]) -> pa.Table:
        """Return a row group, from the folder or decoded and stored there; if the folder fails, just decoded."""
        if (table := self._map(group)) is not None:
            return table
        with contextlib.ExitStack() as stack:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self._folder / _LOCKS, group))
            except OSError as error:
                self._do_without(error)
                return decode(group)
            if (table := self._map(group)) is None:
                table = decode(group)
                try:
                    self._put(group, table)
                except OSError as error:
                    self._do_without(error)
            return table

    def _path(self, group: int) -> Path:
        return self._folder / f"{group}{_NAME}"

    def _map(self, group: int) -> pa.Table | None:
        """Return an intact entry, else None."""
        path = self._path(group)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            size = os.fstat(file).st_size - _TRAILER.size
            num_bytes, checksum, kind = _TRAILER.unpack(os.pread(file, _TRAILER.size, max(0, size)))
            if (num_bytes, kind) != (size, _FORMAT):
                return None
            mapping = Mapping(file, size)
            _mark_used(file)
            mapping.populate()
        except (OSError, struct.error):
            return None
        finally:
            os.close(file)
        if crc32(mapping.buffer) != checksum:
            _LOG.warning("%s: is damaged, and made again from its file; check the disk if that happens often", path)
            return None
        try:
            return pa.ipc.open_stream(mapping.buffer).read_all()
        except pa.ArrowInvalid:
            return None

    def _put(self, group: int, table: pa.Table) -> None:
        """Write an entry once there is room."""
        measure = pa.MockOutputStream()
        _write(table, measure)
        size = measure.size()
        content = pa.allocate_buffer(size)
        _write(table, pa.FixedSizeBufferWriter(content))
        trailer = _TRAILER.pack(size, crc32(content), _FORMAT)
        path = self._path(group)
        partial = path.with_suffix(_PARTIAL)
        try:
            with partial.open("wb") as file:
                if not self._reserve(size + len(trailer), lambda: os.truncate(partial, size + len(trailer))):
                    return
                file.write(content)
                file.write(trailer)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)

    @functools.cached_property
    def _max_bytes(self) -> int:
        """Bytes that the folder, which exists, may take: half of its disk unless a limit was given."""
        return shutil.disk_usage(self._root).total // 2 if self._own_max_bytes is None else self._own_max_bytes

    def _reserve(self, size: int, claim: Callable[[], None]) -> bool:
        """Count bytes about to be written, and make room; return False if that is impossible."""
        if size > self._max_bytes:
            return False
        with locked(self._root / _COUNT, 0) as file:
            counted = os.pread(file, 8, 0)
            total = int.from_bytes(counted, "little")
            if len(counted) < 8 or total + size > self._max_bytes:
                total = self._evict(size)
            if total + size > self._max_bytes:
                return False
            os.pwrite(file, (total + size).to_bytes(8, "little"), 0)
            claim()  # from now on the folder shows the bytes as well
            return True

    def _evict(self, size: int) -> int:
        """Delete leftovers, then the least recently used entries, until there is room; return the remaining bytes."""
        found, total = [], 0
        for path in self._entries():
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                found.append((path.suffix != _PARTIAL, stat.st_mtime_ns, stat.st_size, path))
                total += stat.st_size
        if total + size <= self._max_bytes:
            return total
        for _, _, num_bytes, path in sorted(found):
            if total + size <= self._max_bytes - self._max_bytes // SLACK:
                break
            if path.suffix == _PARTIAL and is_locked(path.with_name(_LOCKS), int(path.stem)):
                continue  # being written
            path.unlink(missing_ok=True)
            total -= num_bytes
        return total

    def _entries(self) -> Iterator[Path]:
        """Yield the entries of all datasets, including those being written."""
        for path in self._root.glob("*/*.*"):
            if _ENTRY.fullmatch(path.relative_to(self._root).as_posix()):
                yield path

    def _do_without(self, error: OSError) -> None:
        """Log once that the folder cannot be used; rows are then read from their files."""
        if not self._is_broken:
            self._is_broken = True
            _LOG.warning(
                "%s: decoded rows cannot be cached (%s); decoding them each time, check data.cache_dir",
                self._root,
                error,
            )


def _write(table: pa.Table, sink: pa.NativeFile) -> None:
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def _mark_used(file: int) -> None:
    """Set an open entry's modification time to now; fails silently for another user's entry."""
    with contextlib.suppress(OSError):
        os.utime(file)


_MADV_POPULATE_READ = 22
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)  # releases the interpreter's lock in every call
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapping:
    """The first `size` bytes of an open file, read-only; mapped while this object or its buffer is in use.

    pyarrow's own mapping asks the kernel for the whole file as soon as a buffer is made, so a first batch of a few
    rows waits for megabytes; Python's keeps a descriptor open while the mapping lives.
    """

    def __init__(self, file: int, size: int) -> None:
        self._size, self._address = size, _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
        if self._address == _FAILED:
            self._size = 0
            raise OSError(ctypes.get_errno(), f"{size} bytes of a file could not be mapped into memory")

    def __del__(self) -> None:
        if self._size:
            _libc.munmap(self._address, self._size)

    @property
    def buffer(self) -> pa.Buffer:
        """The bytes, without a copy."""
        return pa.foreign_buffer(self._address, self._size, base=self)

    def populate(self) -> None:
        """Read all of it now if the kernel can (Linux 5.14); otherwise pages are read on use.

        Raise OSError for a disk that cannot read it, which on use would end the process with SIGBUS.
        """
        is_read = _libc.madvise(self._address, self._size, _MADV_POPULATE_READ) == 0
        if not is_read and (number := ctypes.get_errno()) != errno.EINVAL:
            raise OSError(number, f"{self._size} bytes of a mapped file could not be read")
