"""Check a job's folders from this node: data written and synced there must be read back unchanged.

Only changed bytes, and errors of a local device, make a node unfit: a full disk, a read-only folder or a server that is
away is reported, and training copes with it (such a node writes no part of commits).
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from elastic_train.health.result import Finding, fail, ok, warn
from elastic_train.system.file_systems import mount_of
from elastic_train.system.wording import size

NUM_BYTES = 2 << 20
BROKEN = frozenset({errno.EIO, errno.ENXIO, errno.ENODEV, errno.EUCLEAN, errno.EBADMSG})
"""Errors of a failing device, or of damaged data."""


def anonymous_file(folder: Path) -> IO[bytes]:
    """Open an invisible file in a folder, which disappears with its last descriptor."""
    return tempfile.TemporaryFile(dir=folder)


def examine_folders(
    folders: Iterable[str], anonymous: Callable[[Path], IO[bytes]] = anonymous_file
) -> Iterator[Finding]:
    """Yield for each folder whether it keeps what is written; a missing folder's nearest parent is checked."""
    for folder in dict.fromkeys(_existing(Path(one)) for one in folders):
        try:
            yield _examined(folder, anonymous)
        except OSError as error:
            found = f"{folder}: a file of {size(NUM_BYTES)} cannot be written and read: {error.strerror or error}"
            mount = mount_of(folder)
            if error.errno in BROKEN and mount is not None and mount.is_local:
                yield fail("disk", found, "replace the disk, or name a folder on another one")
            else:
                yield warn("disk", found, "make room, and let this user write there: docs/storage.md")


def _existing(folder: Path) -> Path:
    folder = folder.expanduser().absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _examined(folder: Path, anonymous: Callable[[Path], IO[bytes]]) -> Finding:
    written = os.urandom(NUM_BYTES)
    with anonymous(folder) as file:
        file.write(written)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the device is read, not the cache
        file.seek(0)
        read = file.read()
    if read == written:
        return ok("disk", f"{folder} keeps what is written")
    same = next((i for i, (one, other) in enumerate(zip(written, read, strict=False)) if one != other), len(read))
    found = f"{folder} gives other bytes than were written: of {NUM_BYTES}, {len(read)} come back, right up to {same}"
    return fail("disk", found, "replace the disk, or name a folder on another one")
