"""A file system in a file that can be frozen: what writes to it then waits, as on a server that is away.

A process that waits in it does not even die of SIGKILL before it is thawed. What is read goes on being answered.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from chaos.services.store_mount import NoMountError, run_as_root

_MB = 128


class FreezingDisk:
    """A mounted file system, frozen or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_frozen = False

    def freeze(self) -> None:
        """Let every write wait from now on."""
        run_as_root("fsfreeze", "--freeze", str(self.folder))
        self._is_frozen = True

    def refuses_to_freeze(self) -> bool:
        """Say whether it is frozen, by what the kernel has: it freezes nothing a second time."""
        try:
            run_as_root("fsfreeze", "--freeze", str(self.folder))
        except NoMountError:
            return True
        run_as_root("fsfreeze", "--unfreeze", str(self.folder))
        return False

    def thaw(self) -> None:
        """Let what waits go on; nothing happens if nothing is frozen."""
        if self._is_frozen:
            run_as_root("fsfreeze", "--unfreeze", str(self.folder))
            self._is_frozen = False


@contextlib.contextmanager
def freezing_disk(folder: Path) -> Iterator[FreezingDisk]:
    """Mount a small file system at a folder, and leave what it held as files of the folder; NoMountError."""
    folder.mkdir(parents=True, exist_ok=True)
    image = folder.with_name(f"{folder.name}.image")
    with image.open("wb") as file:
        file.truncate(_MB << 20)
    disk = FreezingDisk(folder)
    try:
        run_as_root("mkfs.ext4", "-q", "-m", "0", str(image))
        run_as_root("mount", "-o", "loop", str(image), str(folder))
        (folder / "lost+found").rmdir()
        try:
            disk.freeze()
            disk.thaw()
            yield disk
        finally:
            disk.thaw()
            kept = folder.with_name(f"{folder.name}.kept")
            shutil.copytree(folder, kept)
            run_as_root("umount", "--lazy", str(folder))
            folder.rmdir()
            kept.rename(folder)
    finally:
        image.unlink()
