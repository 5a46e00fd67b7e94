"""What a task is to do to the process that it computes in: an order is a file in the failpoints of the process's node.

Whoever finds it first renames it to <name>.<pid>, does it, and writes into the file what that was. Some orders stand
until they are withdrawn: every process that finds one does it.
"""

from __future__ import annotations

import os
from pathlib import Path

from elastic_train.system.failpoints import VARIABLE


def give(folder: Path, name: str) -> bool:
    """Leave an order for the processes of a node; False if one of this name still waits there."""
    if (folder / name).exists():
        return False
    for done in folder.glob(f"{name}.*"):  # before the order is there: it may be carried out at once
        done.unlink()
    (folder / name).touch(exist_ok=False)
    return True


def withdraw(folder: Path, name: str) -> None:
    """Take back an order that stands."""
    (folder / name).unlink(missing_ok=True)


def done_by(folder: Path, name: str) -> str | None:
    """Return what the process that has found an order says that it did; None as long as none says it."""
    return next((text for path in folder.glob(f"{name}.*") if (text := path.read_text())), None)


class Orders:
    """The orders for this process."""

    def __init__(self) -> None:
        self._folder = Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None

    def take(self, name: str) -> Path | None:
        """Return the file into which to write what was done, if it is asked for and no other process was before."""
        if self._folder is None:
            return None
        mine = self._folder / f"{name}.{os.getpid()}"
        try:
            (self._folder / name).rename(mine)
        except FileNotFoundError:
            return None
        return mine

    def heed(self, name: str) -> Path | None:
        """Return the file into which to write what was done, if every process is asked for it at present."""
        if self._folder is None or not (self._folder / name).exists():
            return None
        return self._folder / f"{name}.{os.getpid()}"
