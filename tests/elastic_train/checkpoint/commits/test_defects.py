"""The table of defects in docs/evidence.md names tests that exist."""

from __future__ import annotations

import re

from tests.conftest import ROOT


def test_every_defect_names_a_test_that_exists() -> None:
    """Each line of the table has a test, and no name in it is stale."""
    _, _, table = (ROOT / "docs" / "evidence.md").read_text().partition("| defect |")
    lines = table.splitlines()[2:]
    named = [re.findall(r"`(test_\w+)::(test_\w+)`", line) for line in lines]
    assert len(lines) > 25
    assert all(named), "a defect without a test"
    for room, name in {pair for pairs in named for pair in pairs}:
        files = [path.read_text() for path in (ROOT / "tests").rglob(f"{room}.py")]
        assert any(f"\ndef {name}(" in text for text in files), f"{room} has no {name}"
