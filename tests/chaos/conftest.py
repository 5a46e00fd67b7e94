"""Fixtures for a judge that examines a thousand variants of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from chaos.judge.evidence import stored_weights


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
