"""Small files that are replaced in one step, and what appears in one."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def draft_of(path: Path) -> Path:
    """Return a name beside a file that nobody else uses: containers that share a folder may have equal process ids."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step: readers see the old text or the new one. A draft that fails is removed.

    Any number of processes, of any number of machines, may replace it at once: the last one wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(path)
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def publish(draft: Path, target: Path) -> None:
    """Rename a file, or a folder, that is on the disk by then: after a loss of power it is whole, or is not there."""
    for path in draft.rglob("*"):
        _sync(path)
    _sync(draft)
    draft.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
