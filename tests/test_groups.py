"""Tests of one `xdist_group` run on one process, one after another."""

from __future__ import annotations

import copy

import pytest
from xdist.scheduler import LoadGroupScheduling

from tests.conftest import name_group


@pytest.mark.xdist_group("one cable")
@pytest.mark.parametrize("text", ["a", "b@c [d]"])
def test_a_group_is_named_where_xdist_looks_for_it(request: pytest.FixtureRequest, text: str) -> None:
    """Elsewhere nobody would see it: the tests would only run beside each other."""
    item = copy.copy(request.node)
    for _ in range(2):
        name_group(item)
        assert LoadGroupScheduling._split_scope(None, item.nodeid) == "one cable"  # type: ignore[arg-type]
    assert item.nodeid.count("@one cable") == 1
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid == item.nodeid
