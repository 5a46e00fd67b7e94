"""Small files that are replaced in one step."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step: readers see the old text or the new one. A draft that fails is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
