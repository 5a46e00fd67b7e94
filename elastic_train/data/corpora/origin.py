"""Origin of a dataset: origin.json names the source and every parameter, and is written last.

A dataset with the requested origin is complete and not made again. One with another origin, or a folder with other
content, is overwritten only with `replace`. Folders are filled under a temporary name and renamed, so an interrupted
import leaves nothing under the final name.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from elastic_train.errors import ConfigError, StorageError
from elastic_train.system.process_identity import pid_space, process_identity
from rendezvous.process_table import is_alive

NAME = "origin.json"
LONG_S = 86_400.0
"""Seconds without a change after which the draft of an unreachable process is abandoned."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

Origin = Mapping[str, object]


def is_finished(folder: Path, origin: Origin, *, replace: bool = False) -> bool:
    """Return True if `folder` already holds this dataset; raise ConfigError if it holds anything else, or has no name.

    A finished draft takes the folder's place: the working folder would be moved away under whoever is in it.
    """
    if folder.name in ("", ".."):
        raise ConfigError(f"{folder}: is no name for a dataset; name a folder in it")
    found, wanted = read_origin(folder), json.loads(json.dumps(origin))
    if found == wanted:
        return True
    if replace or not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if found is None:
        raise ConfigError(f"{folder}: exists and is not an imported dataset; choose another folder, or add --replace")
    differing = ", ".join(name for name in {**found, **wanted} if found.get(name) != wanted.get(name))
    raise ConfigError(f"{folder}: holds a dataset made differently ({differing}); choose another folder, or --replace")


def read_origin(folder: Path) -> dict[str, object] | None:
    """Return the origin of the dataset in `folder`; None if it has none that can be read."""
    try:
        found = json.loads((folder / NAME).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


@contextmanager
def filled(folder: Path, origin: Origin) -> Iterator[Path]:
    """Yield an empty folder to fill; on success it replaces `folder` by a rename.

    Raise StorageError if the disk is full, with the location, which libraries omit.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left_over in folder.parent.glob(f".{folder.name}.*.partial"):
        if _is_abandoned(left_over):
            shutil.rmtree(left_over, ignore_errors=True)
    partial = _beside(folder, "partial")
    partial.mkdir()
    try:
        with telling_if_full(folder):
            yield partial
            (partial / NAME).write_text(json.dumps(origin, indent=2, sort_keys=True) + "\n")
            _put(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def telling_if_full(folder: Path) -> Iterator[None]:
    """Raise StorageError with the folder if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        why = os.strerror(error.errno)
        raise StorageError(f"{folder}: cannot write: {why}; make room there, or name another folder") from error


def _put(partial: Path, folder: Path) -> None:
    """Rename over the target; its old content is moved away first and deleted afterwards."""
    old = _beside(folder, "old.partial")
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _beside(folder: Path, ending: str) -> Path:
    """Return the path of a new draft, whose name identifies its process, machine and container."""
    who = f"{os.getpid()}-{process_identity()['born']}-{pid_space()}-{uuid.uuid4().hex}"
    return folder.with_name(f".{folder.name}.{who}.{ending}")


def _is_abandoned(draft: Path) -> bool:
    """Return True if the process that made a draft has ended; for unreachable processes, if the draft is old."""
    pid, _, rest = draft.name.removesuffix(".partial").removesuffix(".old").rpartition(".")[2].partition("-")
    born, _, rest = rest.partition("-")
    if rest.rpartition("-")[0] == pid_space() and pid.isdigit() and born.isdigit():
        return not is_alive(int(pid), int(born))
    try:
        return time.time() - draft.stat().st_mtime > LONG_S
    except OSError:
        return False


_CODE = re.compile(
    r"^\s*(>>>|\.\.\.(\s|$)|\$ |import |from \w+ import |def |class |return\b|@\w)"  # start of a line of code
    r"|[\w\])]\(.*\)\s*$|[;{}]\s*$"  # end of one
)
_INDENTED = re.compile(r"^ {8,}\S")


@dataclass(frozen=True, slots=True)
class Sample:
    """A text and its label; `numeric` and `categorical` follow the schema's columns, None where unknown."""

    text: str
    label: str
    numeric: tuple[float | None, ...] = ()
    categorical: tuple[str | None, ...] = ()


def is_no_label(text: str) -> bool:
    """Return True for a blank name, or the nan that pandas writes for a missing one."""
    return text.strip().casefold() in ("", "nan")


def no_label(place: str, column: str) -> str:
    """Return the message for a row without a label."""
    return f"{place}: has no label: '{column}' is empty or NaN; give the row one, or leave it out"


def measure(text: str) -> tuple[float, float, float]:
    """Return a text's characters, lines, and share of lines that look like code."""
    lines = [line for line in text.splitlines() if line.strip()]
    code = sum(1 for line in lines if _CODE.search(line) or _INDENTED.match(line))
    return float(len(text)), float(len(lines)), code / max(1, len(lines))
