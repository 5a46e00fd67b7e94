"""The length of every row, in a file next to the manifest, so that an order can depend on lengths without reading rows.

`manifest.lengths` has a line of JSON, a CRC-32 per row group, and all lengths in sample id order, two or four bytes
each, so offsets are computed. Lengths are read and compared a row group at a time. The file is made once, by an import
of tokens or by `elastic-train data verify --add-lengths`, from a list column or one that holds lengths.
"""

from __future__ import annotations

import hashlib
import json
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_train.core.arrays import Int64s, group_of
from elastic_train.data.arrow.numbers import lengths_of, numbers_of
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.dataset.row_groups import RowGroups
from elastic_train.data.parquet.sources import NUM_FETCHERS, LocalSource, open_source
from elastic_train.errors import ConfigError, DataError
from elastic_train.system.progress_bar import Track, silent

NAME = "manifest.lengths"
TOKENS = "input_ids"
"""The token column in every imported or packed dataset."""
FORMAT = 1
_MOST_HEADER_BYTES = 4096
_MOST_GROUPS = 4096
"""Row groups whose lengths are cached: 16 MB with 2,000 rows each."""


class Lengths:
    """Returns the lengths of ids; picklable, thread-safe."""

    def __init__(
        self,
        manifest: Manifest,
        header: bytes,
        sums: npt.NDArray[np.uint32],
        width: int,
        column: str,
        longest: int | None,
    ) -> None:
        self.column, self.longest = column, longest
        named = _header(manifest, column, width)  # without the longest, which older files lack
        self.fingerprint = int(hashlib.sha256(named + sums.tobytes()).hexdigest()[:15], 16) or 1
        self._url, self._source = manifest.url, open_source(manifest.url)
        self._rows, self._sums = manifest.group_rows, sums
        self._first_id = manifest.group_first_id
        self._begins_at, self._dtype = len(header) + sums.nbytes, np.dtype(f"<u{width}")
        self._groups: OrderedDict[int, npt.NDArray[np.unsignedinteger]] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_groups": OrderedDict(), "_lock": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __call__(self, ids: Int64s) -> Int64s:
        """Return the row lengths of the ids; raise DataError if the file is damaged."""
        groups = group_of(self._first_id, ids)
        lengths = np.empty(len(ids), dtype=np.int64)
        with self._lock:
            wanted = np.unique(groups).tolist()
            self._fetch([group for group in wanted if group not in self._groups])
            for group in wanted:
                self._groups.move_to_end(group)
                is_of = groups == group
                lengths[is_of] = self._groups[group][ids[is_of] - self._first_id[group]]
            while len(self._groups) > max(_MOST_GROUPS, len(wanted)):
                self._groups.popitem(last=False)
        return lengths

    def _fetch(self, groups: list[int]) -> None:
        """Read row groups' lengths, in parallel over a network."""
        if isinstance(self._source, LocalSource) or len(groups) < 2:
            self._groups.update((group, self._read(group)) for group in groups)
            return
        with ThreadPoolExecutor(min(NUM_FETCHERS, len(groups)), "lengths") as pool:
            self._groups.update(zip(groups, pool.map(self._read, groups), strict=True))

    def _read(self, group: int) -> npt.NDArray[np.unsignedinteger]:
        lo = self._begins_at + int(self._first_id[group]) * self._dtype.itemsize
        try:
            content = self._source.read(NAME, lo, lo + int(self._rows[group]) * self._dtype.itemsize)
        except OSError as error:
            raise DataError(f"{self._url}/{NAME}: cannot be read: {error}") from error
        if zlib.crc32(content) != self._sums[group]:
            raise DataError(f"{self._url}/{NAME}: is damaged; make it again with `data verify --add-lengths`")
        return np.frombuffer(content, dtype=self._dtype)


def find_lengths(manifest: Manifest) -> Lengths | None:
    """Open a dataset's lengths; None if missing or made for another manifest."""
    try:
        return load_lengths(manifest)
    except DataError:
        return None


def load_lengths(manifest: Manifest) -> Lengths:
    """Open a dataset's lengths; raise DataError if missing or made for another dataset."""
    how = f"make it with `elastic-train data verify {manifest.url} --add-lengths COLUMN`"
    num_groups = len(manifest.group_rows)
    try:
        content = open_source(manifest.url).read(NAME, 0, _MOST_HEADER_BYTES + 4 * num_groups)
        header = content[: content.index(b"\n") + 1]
        fields = json.loads(header)
        sums = np.frombuffer(content[len(header) : len(header) + 4 * num_groups], dtype="<u4")
        digest, width, column = str(fields["manifest"]), int(fields["width"]), str(fields["column"])
    except FileNotFoundError as error:
        raise DataError(f"{manifest.url}: no {NAME} there, which data.length_bucketing needs; {how}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{manifest.url}/{NAME}: cannot be read: {error}; {how}") from error
    if digest != manifest.digest or len(sums) != num_groups or fields.get("format") != FORMAT:
        raise DataError(f"{manifest.url}/{NAME}: is not of this manifest ({manifest.digest[:12]}); {how}")
    return Lengths(manifest, header, sums, width, column, fields.get("longest"))


def make_lengths(manifest: Manifest, column: str, *, track: Track = silent) -> Lengths:
    """Read one column of a dataset, and write its rows' lengths next to the manifest.

    For a list column it counts values; integers are taken as lengths.
    """
    groups = RowGroups(manifest, [column])
    numbers = track(range(len(manifest.group_rows)), "reading lengths", len(manifest.group_rows), "row groups")
    return write_lengths(manifest, column, (_lengths_in(groups.decode(group), column) for group in numbers))


def note_lengths(manifest: Manifest) -> None:
    """Write the lengths of a dataset's tokens, if any: a run then knows them before its first step."""
    if manifest.columns.get(TOKENS, "").startswith(("list<", "large_list<")):
        make_lengths(manifest, TOKENS)


def write_lengths(manifest: Manifest, column: str, parts: Iterable[Int64s]) -> Lengths:
    """Write lengths, given a row group at a time, beside the manifest."""
    lengths = [part.astype(np.uint32) for part in parts]
    width = 2 if max(int(part.max()) for part in lengths) < 1 << 16 else 4
    contents = [part.astype(f"<u{width}").tobytes() for part in lengths]
    header = _header(manifest, column, width, longest=max(int(part.max()) for part in lengths))
    with fsspec.open(f"{manifest.url.rstrip('/')}/{NAME}", "wb") as file:
        file.write(header)
        file.write(np.array([zlib.crc32(content) for content in contents], dtype="<u4").tobytes())
        for content in contents:
            file.write(content)
    return load_lengths(manifest)


def _header(manifest: Manifest, column: str, width: int, **more: int) -> bytes:
    fields = {"format": FORMAT, "manifest": manifest.digest, "column": column, "width": width, **more}
    return json.dumps(fields).encode() + b"\n"


def _lengths_in(rows: pa.Table, name: str) -> Int64s:
    column = rows.column(name)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return lengths_of(column)
    if not pa.types.is_integer(column.type) or column.null_count:
        raise ConfigError(
            f"column '{name}' is {column.type}, with {column.null_count} missing: name one of lists, or of lengths"
        )
    lengths: Int64s = numbers_of(column).astype(np.int64)
    if lengths.min() < 0:
        raise ConfigError(f"column '{name}' holds {lengths.min()}, which is not a length")
    return lengths
