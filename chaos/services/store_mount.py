"""A node's private mount of the commit folder, which can be made read-only for that node.

The node's writes then fail, as on a file system that was remounted read-only after an error, or where one machine lacks
permissions. Its reads and the other nodes' writes still work.
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
    """This machine does not permit mounts; the message says why."""


class StoreMount:
    """The folder `store`, mounted a second time at `folder`."""

    def __init__(self, store: Path, folder: Path) -> None:
        self.store, self.folder, self.is_readonly = store, folder, False

    def set_readonly(self, *, is_readonly: bool) -> None:
        """Make the mount read-only or writable, for running and future processes.

        Nodes in network namespaces have mount namespaces too. Mount options do not propagate to these, so the folder is
        remounted in each.
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
        """Return one process of each other mount namespace in which the folder is mounted."""
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
    """Mount a folder at a second path; raises NoMountError."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as undo:
        undo.callback(folder.rmdir)
        run_as_root("mount", "--rbind", str(store), str(folder))
        undo.callback(run_as_root, "umount", "--lazy", str(folder))
        yield StoreMount(store, folder)


def _insist(*command: str) -> None:
    """Retry a mount command until no file is open for writing there; raises NoMountError on timeout."""
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
    """Run a command that mounts; raises NoMountError with its output if it fails."""
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError as error:
        raise NoMountError(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise NoMountError(f"{' '.join(command)}: {error.stderr.decode().strip()}") from error
