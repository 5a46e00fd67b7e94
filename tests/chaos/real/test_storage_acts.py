"""What proves that a fault of the storage bit, on real file systems."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaos.real.acts.storage import ACTS
from chaos.scenario.schedule import Due
from chaos.services.freezing_disk import freezing_disk
from chaos.services.store_mount import NoMountError

pytestmark = pytest.mark.slow


def test_a_frozen_file_system_is_seen(tmp_path: Path) -> None:
    """As long as it is frozen, and by nobody who waits for it; a file system that thawed at once proves nothing."""
    try:
        with freezing_disk(tmp_path / "data") as disk:
            job: Any = SimpleNamespace(around=SimpleNamespace(freezing=[disk]))
            struck = ACTS["freeze_fs"](job, Due("freeze_fs", None, None, 0.0, for_s=1.0))
            assert struck is not None and struck.undo is not None
            assert struck.proof() == "data are frozen"
            assert struck.undo() == []
            assert struck.proof() is None
            (tmp_path / "data" / "x").write_text("as before")
    except NoMountError as error:
        pytest.skip(str(error))
