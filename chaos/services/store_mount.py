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

from rendezvous.process_table import is_alive, pids

_BUSY_S = 10.0


class NoMountError(Exception):
    """This machine lets nobody mount; the message says why."""


class StoreMount:
    """The folder `store`, mounted once more at `folder`."""

    def __init__(self, store: Path, folder: Path) -> None:
        self.store, self.folder, self.is_readonly = store, folder, False

    def set_readonly(self, *, is_readonly: bool) -> None:
        """Refuse writes by this way from now on, or take them again, for running processes and those to come.

        A node in a network namespace has mounts of its own, too, to which the option of another's does not spread.
        """
        remount = ("mount", "-o", f"remount,bind,{'ro' if is_readonly else 'rw'}", str(self.folder))
        _insist(*remount)
        for pid in self._others():
            try:
                _insist("nsenter", f"--target={pid}", "--mount", *remount)
            except NoMountError:
                if is_alive(pid):
                    raise
        self.is_readonly = is_readonly

    def _others(self) -> list[int]:
        """Return a process of each mount namespace but this one in which the folder is mounted."""
        found: dict[str, int] = {}
        for pid in pids():
            process = Path(f"/proc/{pid}")
            with contextlib.suppress(OSError):  # it has ended
                if f" {self.folder} " in (process / "mountinfo").read_text():
                    found.setdefault(str((process / "ns" / "mnt").readlink()), pid)
        found.pop(str(Path("/proc/self/ns/mnt").readlink()), None)
        return list(found.values())


@contextlib.contextmanager
def mounted(store: Path, folder: Path) -> Iterator[StoreMount]:
    """Mount a folder at another place, too; NoMountError."""
    folder.mkdir(parents=True, exist_ok=True)
    run_as_root("mount", "--rbind", str(store), str(folder))
    try:
        yield StoreMount(store, folder)
    finally:
        run_as_root("umount", "--lazy", str(folder))
        folder.rmdir()


def _insist(*command: str) -> None:
    """Do it as soon as no file is open for writing there."""
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            run_as_root(*command)
            return
        except NoMountError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def run_as_root(*command: str) -> None:
    """Run a command that mounts; NoMountError with what it says if it fails."""
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError as error:
        raise NoMountError(f"there is no {command[0]}") from error
    except subprocess.CalledProcessError as error:
        raise NoMountError(f"{' '.join(command)}: {error.stderr.decode().strip()}") from error
