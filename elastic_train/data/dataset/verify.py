"""Checking a dataset against its manifest: every byte of every file, its footer, its rows, and the coverage sums."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import fsspec

from elastic_train.core.coverage import CoverageSums
from elastic_train.data.dataset.manifest import FileEntry, Manifest
from elastic_train.data.parquet.files import footer_sha256, parse_footer, read_footer
from elastic_train.errors import DataError
from elastic_train.system.progress_bar import Track, silent
from elastic_train.system.sdk_errors import sdk_errors


@dataclass(frozen=True, slots=True)
class Verdict:
    """One checked thing, a file or the manifest itself, and what is wrong with it (None: it is whole)."""

    path: str
    wrong: str | None


def verify(manifest: Manifest, *, track: Track = silent) -> list[Verdict]:
    """Read everything the manifest names; all damage is reported, not only the first."""
    entries = track(manifest.files, "hashing files", len(manifest.files))
    verdicts = [Verdict(entry.path, _wrong_with_file(manifest, entry)) for entry in entries]
    if manifest.tokenizer is not None:
        verdicts.append(Verdict(manifest.tokenizer, _wrong_with_tokenizer(manifest, manifest.tokenizer)))
    verdicts.append(Verdict("manifest.json", _wrong_with_manifest(manifest)))
    return verdicts


def _wrong_with_file(manifest: Manifest, entry: FileEntry) -> str | None:
    path = f"{manifest.url.rstrip('/')}/{entry.path}"
    try:
        with fsspec.open(path, "rb") as file:
            size = file.seek(0, 2)
            if size != entry.size:
                return f"has {size:,} bytes instead of {entry.size:,}: truncated or replaced"
            footer = read_footer(file, size, path)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "is missing"
    except sdk_errors(OSError, DataError) as error:
        return f"cannot be read: {error}"
    if footer_sha256(footer) != entry.footer_sha256:
        return "its footer changed: the file was written again"
    if digest != entry.sha256:
        return "its content changed: bytes differ from those the manifest was made of"
    return _wrong_with_rows(footer, path, entry)


def _wrong_with_rows(footer: bytes, path: str, entry: FileEntry) -> str | None:
    try:
        metadata = parse_footer(footer, path)
    except DataError as error:
        return f"cannot be read: {error}"
    rows = tuple(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
    return None if rows == entry.row_groups else "its row groups are not those of the manifest"


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
        return f"names {manifest.num_rows:,} rows, but its row groups hold {num_rows:,}"
    if manifest.coverage != CoverageSums.of_all(num_rows):
        return "its coverage sums are not those of its rows"
    if manifest.label_counts is not None and sum(manifest.label_counts) != num_rows:
        return "its label counts do not add up to its rows"
    return None
