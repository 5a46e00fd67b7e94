"""Cut a Parquet footer into one small footer per row group, and keep all footers of a dataset in one file.

Reading a row group needs its own entry and the schema, but a footer comes whole: parsing one of 64 row groups takes
longer than decoding a small row group, and parsed footers of a large dataset exceed a manifest's memory. So the bytes
are kept, cut at the row groups, and only the one in use is parsed.

The footer is Thrift's compact protocol (https://github.com/apache/thrift/blob/master/doc/specs/
thrift-compact-protocol.md); of Parquet's FileMetaData only fields 3 (num_rows) and 4 (row_groups) matter here.

The file lies next to the manifest, with checksums of column chunks. With it a reader needs no request before the first
row group's own bytes. It is not part of the manifest's identity: each footer is compared with its fingerprint in the
manifest, and a dataset without the file is read footer by footer. Without it, or if it predates checksums, row groups
are read unchecked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_train.data.parquet.files import MAGIC, footer_sha256, parse_footer
from elastic_train.errors import DataError
from elastic_train.system.wording import sdk_errors

_LOG = logging.getLogger(__name__)
_NUM_ROWS, _ROW_GROUPS = 3, 4
_BOOLS, _BYTE, _VARINTS, _DOUBLE, _BINARY, _LISTS, _MAP, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 11, 12

NAME = "manifest.footers"
_SUMS = "chunk_crc32"
_SCHEMA = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        pa.field("num_bytes", pa.int32(), nullable=False),
        pa.field("zstd", pa.binary(), nullable=False),
        pa.field("num_rows_at", pa.list_(pa.int32(), 2), nullable=False),
        pa.field("list_at", pa.int32(), nullable=False),
        pa.field("bounds", pa.list_(pa.int32()), nullable=False),
        pa.field("chunk_crc32", pa.list_(pa.uint32())),
    ]
)


@dataclass(frozen=True, slots=True)
class Footer:
    """A footer cut at its row groups: `bounds[i]:bounds[i + 1]` of `content` is row group i's entry.

    `sums` are the CRC-32s of all column chunks of the file, row group by row group; None if unknown.
    """

    path: str
    content: bytes
    num_rows_at: tuple[int, int]
    list_at: int
    bounds: tuple[int, ...]
    sums: Sequence[int] | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        return len(self.content) + 8

    @property
    def sha256(self) -> str:
        """Fingerprint as stored in the manifest."""
        return footer_sha256(_closed(self.content))

    def sums_of(self, group: int) -> Sequence[int] | None:
        """Return the CRC-32 of each column chunk of a row group, in schema order; None if unknown."""
        if self.sums is None:
            return None
        num_columns = len(self.sums) // (len(self.bounds) - 1)
        return self.sums[group * num_columns : (group + 1) * num_columns]

    def metadata_of(self, group: int, num_rows: int) -> pq.FileMetaData:
        """Parse the footer of a file reduced to this one row group, which has `num_rows` rows."""
        lo, hi = self.num_rows_at
        thrift = b"".join(
            (
                self.content[:lo],
                _varint(num_rows << 1),  # zigzag
                self.content[hi : self.list_at],
                bytes([1 << 4 | _STRUCT]),
                self.content[self.bounds[group] : self.bounds[group + 1]],
                self.content[self.bounds[-1] :],
            )
        )
        return parse_footer(_closed(thrift), self.path)


def cut_footer(footer: bytes, path: str) -> Footer:
    """Cut a footer, given with length and magic; raise DataError if it is invalid."""
    content = footer[:-8]
    num_rows_at, list_at = (0, 0), 0
    bounds: tuple[int, ...] = (0,)
    try:
        at = field = 0
        while content[at]:
            kind, field, start = _field(content, at, field)
            if field == _NUM_ROWS:
                num_rows_at = (start, _skip(content, start, kind))
            if field == _ROW_GROUPS:
                list_at = start
                bounds = _elements(content, start)
                at = bounds[-1]
            else:
                at = _skip(content, start, kind)
    except IndexError as error:
        raise DataError(f"{path}: its footer cannot be read: it ends too early; copy the file again") from error
    return Footer(path, content, num_rows_at, list_at, bounds)


def _closed(content: bytes) -> bytes:
    return content + len(content).to_bytes(4, "little") + MAGIC


def _field(content: bytes, at: int, last: int) -> tuple[int, int, int]:
    """Read a field's header: return its type, id, and the offset of its value."""
    header = content[at]
    if header >> 4:
        return header & 15, last + (header >> 4), at + 1
    zigzag, at = _read_varint(content, at + 1)
    return header & 15, (zigzag >> 1) ^ -(zigzag & 1), at


def _elements(content: bytes, at: int) -> tuple[int, ...]:
    """Return the offsets of a list's structs, and the end of the last."""
    _, size, at = _list_header(content, at)
    bounds = [at]
    for _ in range(size):
        at = _skip(content, at, _STRUCT)
        bounds.append(at)
    return tuple(bounds)


def _list_header(content: bytes, at: int) -> tuple[int, int, int]:
    """Return the elements' type, their count, and the offset of the first."""
    header = content[at]
    if header >> 4 < 15:
        return header & 15, header >> 4, at + 1
    size, at = _read_varint(content, at + 1)
    return header & 15, size, at


def _skip(content: bytes, at: int, kind: int) -> int:
    """Return the end of a value that begins at `at`; a bool inside a struct takes no bytes."""
    if kind in _VARINTS:
        while content[at] & 0x80:
            at += 1
        return at + 1
    if kind == _BINARY:
        size, at = _read_varint(content, at)
        return at + size
    if kind == _STRUCT:
        while header := content[at]:
            at = at + 1 if header >> 4 else _read_varint(content, at + 1)[1]
            at = _skip(content, at, header & 15)
        return at + 1
    if kind in _LISTS:
        kind, size, at = _list_header(content, at)
        return _skip_many(content, at, (kind,), size)
    if kind == _MAP:
        size, at = _read_varint(content, at)
        return _skip_many(content, at + 1, (content[at] >> 4, content[at] & 15), size) if size else at
    return at + {_BYTE: 1, _DOUBLE: 8}.get(kind, 0)


def _skip_many(content: bytes, at: int, kinds: tuple[int, ...], times: int) -> int:
    """Skip the elements of a list or map, where a bool takes one byte."""
    for _ in range(times):
        for kind in kinds:
            at = at + 1 if kind in _BOOLS else _skip(content, at, kind)
    return at


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    """Return a variable-length number and where it ends."""
    number = shift = 0
    while content[at] & 0x80:
        number |= (content[at] & 0x7F) << shift
        shift += 7
        at += 1
    return number | content[at] << shift, at + 1


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*written, number])


class Footers:
    """The footers of a dataset's files, in manifest order; compressed until used."""

    def __init__(self, table: pa.Table) -> None:
        if _SUMS not in table.column_names:
            table = table.append_column(_SCHEMA.field(_SUMS), pa.nulls(len(table), _SCHEMA.field(_SUMS).type))
        self._columns = [table.column(name).combine_chunks() for name in _SCHEMA.names]

    @property
    def have_sums(self) -> bool:
        """True if every file has checksums."""
        return bool(self._columns[-1].null_count == 0)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, number: int) -> Footer:
        path, num_bytes, zstd, num_rows_at, list_at, bounds, sums = (column[number].as_py() for column in self._columns)
        content = pa.decompress(zstd, num_bytes, codec="zstd", asbytes=True)
        return Footer(path, content, tuple(num_rows_at), list_at, tuple(bounds), sums)


def write_footers(url: str, footers: Sequence[Footer]) -> None:
    """Write the footers of a dataset beside its manifest."""
    columns = [
        [footer.path for footer in footers],
        [len(footer.content) for footer in footers],
        [pa.compress(footer.content, codec="zstd", asbytes=True) for footer in footers],
        [list(footer.num_rows_at) for footer in footers],
        [footer.list_at for footer in footers],
        [list(footer.bounds) for footer in footers],
        [footer.sums for footer in footers],
    ]
    table = pa.table(columns, schema=_SCHEMA)
    with fsspec.open(f"{url.rstrip('/')}/{NAME}", "wb") as file:
        pq.write_table(table, file, compression="none", write_page_checksum=True)


def load_footers(url: str) -> Footers | None:
    """Read a dataset's footers; None without them or, with a warning, if they cannot be read."""
    try:
        return read_footers(url)
    except sdk_errors(OSError) as error:
        _LOG.warning("%s/%s cannot be read (%s): nothing is compared with it", url.rstrip("/"), NAME, error)
        return None


def read_footers(url: str) -> Footers | None:
    """Read a dataset's footers; None without them, or if they are damaged. Raise OSError, or an SDK's error, if their
    storage fails, which may be over soon."""
    try:
        with fsspec.open(f"{url.rstrip('/')}/{NAME}", "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return None
    try:
        file = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
        return Footers(file.read(use_threads=False))
    except (OSError, pa.ArrowInvalid, KeyError):
        return None
