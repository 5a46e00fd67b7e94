"""One node's way to the folder of the commits: the same folder by another path, which can be made read-only.

What the node writes through it fails then, as on a file system that an error has made read-only, or by permissions
that one machine lacks; what it reads, and what others write, is as before.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

_BUSY_S = 10.0


class NoMountError(Exception):
    """This machine lets nobody mount; the message says why."""


class StoreMount:
    """The folder `store`, mounted once more at `folder`."""

    def __init__(self, store: Path, folder: Path) -> None:
        self.store, self.folder, self.is_readonly = store, folder, False

    def set_readonly(self, *, is_readonly: bool) -> None:
        """Refuse writes by this way from now on, or take them again."""
        deadline = time.monotonic() + _BUSY_S
        while True:
            try:
                _do("mount", "-o", f"remount,bind,{'ro' if is_readonly else 'rw'}", str(self.folder))
                self.is_readonly = is_readonly
                return
            except NoMountError:  # a file is open for writing at this moment
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


@contextlib.contextmanager
def mounted(store: Path, folder: Path) -> Iterator[StoreMount]:
    """Mount a folder at another place, too; NoMountError."""
    folder.mkdir(parents=True, exist_ok=True)
    _do("mount", "--rbind", str(store), str(folder))
    try:
        yield StoreMount(store, folder)
    finally:
        _do("umount", "--lazy", str(folder))
        folder.rmdir()


def _do(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError as error:
        raise NoMountError(f"there is no {command[0]}") from error
    except subprocess.CalledProcessError as error:
        raise NoMountError(f"{' '.join(command)}: {error.stderr.decode().strip()}") from error
