"""Tests of one `xdist_group` run one after another in one process; and the limits of quick tests."""

from __future__ import annotations

import copy
from pathlib import Path
from unittest.mock import Mock

import pytest
from xdist.scheduler import LoadGroupScheduling

from tests.conftest import assert_slow, name_group, pytest_ignore_collect


@pytest.mark.xdist_group("one cable")
@pytest.mark.parametrize("text", ["a", "b@c [d]"])
def test_a_group_is_named_where_xdist_looks_for_it(request: pytest.FixtureRequest, text: str) -> None:
    """Anywhere else it would be ignored, and the tests would run in parallel."""
    item = copy.copy(request.node)
    for _ in range(2):
        name_group(item)
        assert LoadGroupScheduling._split_scope(None, item.nodeid) == "one cable"  # type: ignore[arg-type]
    assert item.nodeid.count("@one cable") == 1
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid == item.nodeid


def test_a_quick_test_may_not_start_processes() -> None:
    with pytest.raises(
        AssertionError, match=r"may_not_start_processes is to be a quick test, and starts etcd: mark it"
    ):
        assert_slow("etcd")


@pytest.mark.slow
def test_a_slow_test_may_start_processes() -> None:
    assert_slow("etcd")


@pytest.mark.parametrize("line", ["pytest.mark.slow", '[pytest.mark.slow, pytest.mark.xdist_group("a")]  # one', "a"])
@pytest.mark.parametrize("asked", ["not long and not slow", "not long", "slow", "long or not slow", ""])
def test_a_module_of_slow_tests_is_not_imported_where_none_are_run(tmp_path: Path, line: str, asked: str) -> None:
    """With slow tests selected nothing is skipped, nor is a module with some quick tests."""
    module = tmp_path / "test_a.py"
    module.write_text(f"import pytest\n\npytestmark = {line}\n")
    found = pytest_ignore_collect(module, Mock(option=Mock(markexpr=asked)))
    assert found is (True if asked == "not long and not slow" and line != "a" else None)
    assert pytest_ignore_collect(tmp_path, Mock(option=Mock(markexpr=asked))) is None
