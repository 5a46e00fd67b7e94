"""A mapping holds nothing but memory, and lasts as long as anybody uses its bytes."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

import pyarrow as pa
import pytest

from elastic_train.data.loading.reader import Mapping


def maps_of(path: Path) -> int:
    """Count this process's mappings of a file."""
    return Path("/proc/self/maps").read_text().count(str(path))


def descriptors_of(path: Path) -> int:
    """Count this process's open descriptors of a file; of other threads' descriptors nothing is said."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as the listing's own
            links.append(str(entry.readlink()))
    return sum(link.startswith(str(path)) for link in links)


def map_file(path: Path, size: int) -> Mapping:
    file = os.open(path, os.O_RDONLY)
    try:
        return Mapping(file, size)
    finally:
        os.close(file)


@pytest.mark.slow
def test_bytes_outlive_their_mapping_and_their_file(tmp_path: Path) -> None:
    """No descriptor stays open; what was made of the bytes keeps them, also when the file is gone; then they go."""
    path, content = tmp_path / "numbers", bytes(range(250)) * 400
    path.write_bytes(content)
    mapping = map_file(path, len(content) - 8)
    mapping.populate()
    part = mapping.buffer.slice(1000, 500)
    numbers = pa.Array.from_buffers(pa.uint8(), 500, [None, part])
    del mapping, part
    path.unlink()
    gc.collect()
    assert numbers.to_pylist() == list(content[1000:1500])
    assert maps_of(path) == 1
    assert descriptors_of(path) == 0
    del numbers
    gc.collect()
    assert maps_of(path) == 0


def test_an_unmappable_file_is_refused(tmp_path: Path) -> None:
    """An empty file, and anything but a file, is the operating system's error, not a crash."""
    (tmp_path / "empty").touch()
    for path, size in ((tmp_path / "empty", 0), (tmp_path, 8)):
        with pytest.raises(OSError, match="could not be mapped"):
            map_file(path, size)


def test_what_cannot_be_read_is_an_error_and_no_signal(tmp_path: Path) -> None:
    """A page without a file behind it, as that of a bad sector, would end the process where it is used."""
    path = tmp_path / "numbers"
    path.write_bytes(bytes(100_000))
    mapping = map_file(path, 100_000)
    os.truncate(path, 0)
    with pytest.raises(OSError, match="could not be read"):
        mapping.populate()
