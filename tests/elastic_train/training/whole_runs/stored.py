"""A run made on two ranks by an earlier layout of the code, stopped after the commit of step 14 of 28."""

from __future__ import annotations

import shutil
from pathlib import Path

STORED = Path(__file__).parent / "stored_run"


def copy_stored_run(folder: Path) -> Path:
    """Copy the run, its dataset and its configuration (with relative paths) below `folder`; return the copy's path."""
    return Path(shutil.copytree(STORED, folder / "stored_run"))
