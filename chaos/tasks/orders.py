"""Orders to a task to damage its own process; an order is a file in the folder of its node's failpoints.

The first process that finds it renames it to <name>.<pid>, executes it, and writes a report into the file. Standing
orders apply to every process until they are withdrawn.
"""

from __future__ import annotations

import os
from pathlib import Path

from elastic_train.system.failpoints import VARIABLE


def give(folder: Path, name: str) -> bool:
    """Leave an order for a node's processes; return False if one of this name is still waiting."""
    if (folder / name).exists():
        return False
    for done in folder.glob(f"{name}.*"):  # first, as the order may be executed at once
        done.unlink()
    (folder / name).touch(exist_ok=False)
    return True


def withdraw(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)


def done_by(folder: Path, name: str) -> str | None:
    """Return the report of the process that executed an order; None until there is one."""
    return next((text for path in folder.glob(f"{name}.*") if (text := path.read_text())), None)


class Orders:
    """The orders for this process."""

    def __init__(self) -> None:
        self._folder = Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None

    def take(self, name: str) -> Path | None:
        """Claim an order and return its report file; None if there is none or another process was first."""
        if self._folder is None:
            return None
        mine = self._folder / f"{name}.{os.getpid()}"
        try:
            (self._folder / name).rename(mine)
        except FileNotFoundError:
            return None
        return mine

    def heed(self, name: str) -> Path | None:
        """Return the report file of a standing order; None if there is none at present."""
        if self._folder is None or not (self._folder / name).exists():
            return None
        return self._folder / f"{name}.{os.getpid()}"
