"""Atomic replacement of small files, and atomic publication of files and folders."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def draft_of(path: Path) -> Path:
    """Return a unique name next to a file: containers that share a folder may have equal process ids."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def write_atomically(path: Path, text: str) -> None:
    """Replace a file atomically: readers see the old text or the new one. A failed draft is removed.

    Any number of processes on any machines may replace it at once: the last one wins.
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
    """Rename a file or folder once it is on disk: after a power loss it is complete or missing."""
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
