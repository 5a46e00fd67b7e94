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

from chaos.errors import ScenarioError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Entry = TypeVar("Entry", bound="DataclassInstance")


class Ledger(Generic[Entry]):
    """An append-only file of entries; `read` makes an entry of a line's fields."""

    def __init__(self, path: Path, read: Callable[[Mapping[str, Any]], Entry]) -> None:
        """Open the file, creating it if necessary, and read its entries into `entries`.

        Raise ScenarioError, and change nothing, if it holds anything else.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        *whole, last = content.split(b"\n")
        try:
            self.entries = [read(json.loads(line)) for line in whole]
            if last and not _is_cut(last):
                read(json.loads(last))
        except (ValueError, TypeError, LookupError) as error:
            raise ScenarioError(
                f"{path}: is not a ledger of these jobs and was not changed; name another file"
            ) from error
        self._file = path.open("r+" if content else "w")
        self._file.truncate(len(content) - len(last))
        self._file.seek(0, 2)

    def add(self, entry: Entry) -> None:
        self._file.write(json.dumps(asdict(entry), separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _is_cut(line: bytes) -> bool:
    """Return True if a line is the beginning of a mapping in JSON."""
    try:
        json.loads(line)
    except ValueError:
        return line.startswith(b"{")
    return False


def code_version() -> str:
    """Return the commit of this code, with a trailing + if it has local changes; "" without git."""
    described = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run([*described, "--exclude=*"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
