"""A file of outcomes, one JSON line each, so that a long campaign can be interrupted and continued.

A line truncated by the end of its process is dropped, and what it told of is run again.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Entry = TypeVar("Entry", bound="DataclassInstance")


class Ledger(Generic[Entry]):
    """An append-only file of entries; `read` makes an entry of a line's fields."""

    def __init__(self, path: Path, read: Callable[[Mapping[str, Any]], Entry]) -> None:
        """Open the file, creating it if necessary, and read its entries into `entries`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        self.entries = [read(json.loads(line)) for line in whole.splitlines()]
        self._file = path.open("r+" if text else "w")
        self._file.truncate(len(whole.encode()))
        self._file.seek(0, 2)

    def add(self, entry: Entry) -> None:
        self._file.write(json.dumps(asdict(entry), separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def code_version() -> str:
    """Return the commit of this code, with a trailing + if it has local changes; "" without git."""
    described = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run([*described, "--exclude=*"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
