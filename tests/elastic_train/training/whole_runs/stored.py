"""A run that an earlier layout of the code made on two ranks, stopped after the commit of step 14 of 28."""

from __future__ import annotations

import shutil
from pathlib import Path

STORED = Path(__file__).parent / "stored_run"


def copy_stored_run(folder: Path) -> Path:
    """Copy the run, its dataset and its configuration, whose paths are relative, below `folder`; return its place."""
    return Path(shutil.copytree(STORED, folder / "stored_run"))
