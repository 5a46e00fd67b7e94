"""A file system in a file that can be frozen: writers then block, as on an unreachable server.

It can also freeze repeatedly, to act as a slow disk. A process blocked on it cannot even be killed by SIGKILL until it
is thawed. Reads are still answered.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from chaos.services.store_mount import run_as_root

_MB = 128


class FreezingDisk:
    """A mounted file system that can be frozen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_frozen = False
        """True if writes may block."""
        self._stuttering: threading.Thread | None = None
        self._is_over = threading.Event()

    def freeze(self) -> None:
        run_as_root("fsfreeze", "--freeze", str(self.folder))
        self.is_frozen = True

    def stutter(self, frozen_s: float, open_s: float) -> None:
        """Freeze repeatedly until `thaw`: block writes for `frozen_s` seconds, accept them for `open_s`."""
        self.freeze()
        self._is_over.clear()
        self._stuttering = threading.Thread(target=self._stutter, args=(frozen_s, open_s), name="slow disk")
        self._stuttering.start()

    def _stutter(self, frozen_s: float, open_s: float) -> None:
        while not self._is_over.wait(frozen_s):
            self._unfreeze()
            if self._is_over.wait(open_s):
                return
            self.freeze()
        self._unfreeze()

    def thaw(self) -> None:
        """Unblock writes; does nothing if the disk is not frozen."""
        if self._stuttering is not None:
            self._is_over.set()
            self._stuttering.join()
            self._stuttering = None
        elif self.is_frozen:
            self._unfreeze()
        self.is_frozen = False

    def _unfreeze(self) -> None:
        run_as_root("fsfreeze", "--unfreeze", str(self.folder))


@contextlib.contextmanager
def freezing_disk(folder: Path) -> Iterator[FreezingDisk]:
    """Mount a small file system at a folder; at the end its contents stay as plain files. Raises NoMountError."""
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
