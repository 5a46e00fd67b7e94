"""Verify a dataset against its manifest: every byte of every file, its footer, its rows, and the coverage sums.

With checksums of row groups, damage is located by row group, column and bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import fsspec
import pyarrow.parquet as pq

from elastic_train.core.accounting import CoverageSums
from elastic_train.data.dataset.manifest import FileEntry, Manifest
from elastic_train.data.parquet.files import all_chunks, chunks_of, digest, footer_sha256, parse_footer, read_footer
from elastic_train.data.parquet.footer import NAME as FOOTERS
from elastic_train.data.parquet.footer import Footer, cut_footer, load_footers, write_footers
from elastic_train.errors import DataError
from elastic_train.system.progress_bar import Track, silent
from elastic_train.system.wording import counted, sdk_errors


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage in a row group, numbered within its file: the bytes [lo, hi) of one column."""

    row_group: int
    column: str
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """A checked file, or the manifest, and what is wrong with it (None: intact).

    `damage` lists the known damaged parts of a file.
    """

    path: str
    wrong: str | None
    damage: tuple[Damage, ...] = ()


def verify(manifest: Manifest, *, track: Track = silent) -> list[Verdict]:
    """Read everything the manifest names; report all damage, not only the first."""
    footers = load_footers(manifest.url)
    verdicts = []
    for number, entry in enumerate(track(manifest.files, "hashing", len(manifest.files), "files")):
        footer = footers[number] if footers is not None and number < len(footers) else None
        is_known = footer is not None and footer.sha256 == entry.footer_sha256
        verdicts.append(_verdict_on_file(manifest, entry, footer.sums if footer is not None and is_known else None))
    if manifest.tokenizer is not None:
        verdicts.append(Verdict(manifest.tokenizer, _wrong_with_tokenizer(manifest, manifest.tokenizer)))
    verdicts.append(Verdict("manifest.json", _wrong_with_manifest(manifest)))
    return verdicts


def has_checksums(manifest: Manifest) -> bool:
    footers = load_footers(manifest.url)
    return footers is not None and footers.have_sums


def _verdict_on_file(manifest: Manifest, entry: FileEntry, sums: Sequence[int] | None) -> Verdict:
    """Read a file once; `sums` are the CRC-32s of its column chunks, None if unknown."""
    path = f"{manifest.url.rstrip('/')}/{entry.path}"
    try:
        with fsspec.open(path, "rb") as file:
            size = file.seek(0, 2)
            if size != entry.size:
                wrong = f"has {size:,} bytes instead of {entry.size:,}: truncated or replaced"
                return Verdict(entry.path, wrong)
            footer = read_footer(file, size, path)
            if footer_sha256(footer) != entry.footer_sha256:
                return Verdict(entry.path, "its footer changed: the file was written again, or is damaged there")
            metadata = parse_footer(footer, path)
            sha256, found = digest(file, all_chunks(metadata))
    except FileNotFoundError:
        return Verdict(entry.path, "is missing")
    except sdk_errors(OSError, DataError) as error:
        return Verdict(entry.path, f"cannot be read: {error}")
    damage = _damage(metadata, sums, found)
    return Verdict(entry.path, _wrong_with_content(entry, sha256, metadata, sums, damage), damage)


def _damage(metadata: pq.FileMetaData, sums: Sequence[int] | None, found: Sequence[int]) -> tuple[Damage, ...]:
    """Return the column chunks of a file with differing checksums."""
    numbered = [(group, chunk) for group in range(metadata.num_row_groups) for chunk in chunks_of(metadata, group)]
    return tuple(
        Damage(group, chunk.column, chunk.lo, chunk.hi)
        for (group, chunk), known, crc32 in zip(numbered, found if sums is None else sums, found, strict=True)
        if known != crc32
    )


def _wrong_with_content(
    entry: FileEntry, sha256: str, metadata: pq.FileMetaData, sums: Sequence[int] | None, damage: Sequence[Damage]
) -> str | None:
    rows = tuple(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
    if sha256 == entry.sha256:
        if damage:
            return f"is whole, but checksums in {FOOTERS} are not its own: make them with `data verify --add-checksums`"
        return None if rows == entry.row_groups else "its row groups are not those of the manifest"
    if damage:
        parts = (f"row group {each.row_group}, '{each.column}', bytes [{each.lo}, {each.hi})" for each in damage)
        return f"is damaged: {'; '.join(parts)}"
    where = "" if sums is None else ", outside of its row groups"
    return f"its content changed: bytes differ from those the manifest was made of{where}"


def _wrong_with_tokenizer(manifest: Manifest, name: str) -> str | None:
    try:
        with fsspec.open(f"{manifest.url.rstrip('/')}/{name}", "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
    except sdk_errors(OSError) as error:
        return f"cannot be read: {error}"
    return None if digest == manifest.tokenizer_sha256 else "is not the tokeniser that the data was made with"


def _wrong_with_manifest(manifest: Manifest) -> str | None:
    num_rows = int(manifest.group_rows.sum())
    if num_rows != manifest.num_rows:
        return f"names {counted(manifest.num_rows, 'row', ',')}, but its row groups hold {num_rows:,}"
    if manifest.coverage != CoverageSums.of_all(num_rows):
        return "its coverage sums are not those of its rows"
    if manifest.label_counts is not None and sum(manifest.label_counts) != num_rows:
        return "its label counts do not add up to its rows"
    return None


def add_checksums(manifest: Manifest, *, track: Track = silent) -> int:
    """Read every file of a dataset, write the checksums of its column chunks, and return their number.

    Raise DataError with the file's name, before writing, if one cannot be read or does not match the manifest.

    The manifest stays unchanged, and so do runs: checksums are stored in a separate file with the footers. They are
    made only of files that still match the manifest byte for byte.
    """
    footers = [_footer_of(manifest, entry) for entry in track(manifest.files, "reading", len(manifest.files), "files")]
    write_footers(manifest.url, footers)
    return sum(len(footer.sums or ()) for footer in footers)


def _footer_of(manifest: Manifest, entry: FileEntry) -> Footer:
    path = f"{manifest.url.rstrip('/')}/{entry.path}"
    try:
        with fsspec.open(path, "rb") as file:
            footer = read_footer(file, file.seek(0, 2), path)
            sha256, sums = digest(file, all_chunks(parse_footer(footer, path)))
    except sdk_errors(OSError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if sha256 != entry.sha256:
        raise DataError(f"{path}: is not what the manifest was made of; restore it first, then add checksums")
    return replace(cut_footer(footer, entry.path), sums=sums)
