"""Add checksums of row groups to a dataset described before they existed.

The manifest stays unchanged, and so do runs: checksums are stored in a separate file with the footers. They are made
only of files that still match the manifest byte for byte.
"""

from __future__ import annotations

from dataclasses import replace

import fsspec

from elastic_train.data.dataset.manifest import FileEntry, Manifest
from elastic_train.data.parquet.chunks import all_chunks, digest
from elastic_train.data.parquet.files import parse_footer, read_footer
from elastic_train.data.parquet.footer import Footer, cut_footer
from elastic_train.data.parquet.footer_index import write_footers
from elastic_train.errors import DataError
from elastic_train.system.progress_bar import Track, silent
from elastic_train.system.sdk_errors import sdk_errors


def add_checksums(manifest: Manifest, *, track: Track = silent) -> int:
    """Read every file of a dataset, write the checksums of its column chunks, and return their number.

    Raise DataError with the file's name, before writing, if one cannot be read or does not match the manifest.
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
