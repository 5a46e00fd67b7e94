"""One recorded run, and a judge that examines a thousand variants of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from chaos.judge.evidence import stored_weights
from tests.chaos.recorded import record


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy run with two faults and three terms, one of which lost steps; with its reference."""
    return record(tmp_path_factory.mktemp("recorded") / "run")


@pytest.fixture
def folder(healthy: Path, tmp_path: Path) -> Path:
    """A copy of the healthy run, to be damaged."""
    return Path(shutil.copytree(healthy, tmp_path / "run"))


@pytest.fixture(scope="module")
def weights_loaded_once() -> Iterator[None]:
    """Make torch load equal bytes once: loading is most of the judge's time, and few variants damage weights."""
    load, loaded = stored_weights._load, dict[object, dict[str, object]]()

    def load_once(
        attempt: Path, record: Mapping[str, Any], is_wanted: Callable[[object], bool], *, by_section: bool = False
    ) -> dict[str, object]:
        held = tuple((path.name, path.read_bytes()) for path in sorted(attempt.iterdir()) if path.is_file())
        key = (held, *record["files"], is_wanted("model"), is_wanted("optimizer"), by_section)
        if key not in loaded:
            loaded[key] = load(attempt, record, is_wanted, by_section=by_section)
        return loaded[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_weights, "_load", load_once)
        yield
