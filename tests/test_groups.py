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


@pytest.mark.parametrize(
    ("marks", "asked", "is_left_out"),
    [
        ("pytestmark = pytest.mark.slow", "not long and not slow", True),
        ('pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("a")]  # one', "not long and not slow", True),
        ("pytestmark = pytest.mark.deploy", "not long and not deploy", True),
        ("pytestmark = a", "not long and not slow", False),
        ("pytestmark = pytest.mark.slow", "not long", False),
        ("pytestmark = pytest.mark.slow", "slow", False),
        ("pytestmark = pytest.mark.slow", "long or not slow", False),
        ("pytestmark = pytest.mark.slow", "", False),
        ("pytestmark = pytest.mark.slow", "hunt and not long", True),
        ("@pytest.mark.hunt", "hunt and not long", False),
    ],
)
def test_a_module_of_which_no_test_runs_is_not_imported(
    tmp_path: Path, marks: str, asked: str, is_left_out: bool
) -> None:
    """Those of slow or deployed tests where none are run, and those without hunts where only these are."""
    module = tmp_path / "test_a.py"
    module.write_text(f"import pytest\n\n{marks}\n")
    asked_for = Mock(option=Mock(markexpr=asked))
    assert pytest_ignore_collect(module, asked_for) is (True if is_left_out else None)
    assert pytest_ignore_collect(tmp_path, asked_for) is None
