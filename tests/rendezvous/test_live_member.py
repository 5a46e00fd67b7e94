"""A worker's membership when the worker is asked to leave."""

from __future__ import annotations

import pytest

from rendezvous import EtcdServer
from rendezvous.context import LiveContext
from rendezvous.errors import StoppedWaiting
from rendezvous.live_member import LiveMember
from tests.conftest import PATIENCE_S

pytestmark = pytest.mark.slow


def test_a_worker_regrouping_while_etcd_is_away_can_be_asked_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves at once, with its state to save: it may be asked to leave at the moment when etcd ends as well."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with EtcdServer() as etcd:
        context = LiveContext((etcd.endpoint,), "job", "n", "h", "127.0.0.1", "", 1, 1, 3.0, 0.0, timeout_s=PATIENCE_S)
        member = LiveMember(context, max_members=1)
        assert member.next_world(lambda: False) is not None
        etcd.kill()
        with pytest.raises(StoppedWaiting, match="while etcd was away"):
            member.next_world(lambda: True)
        member.leave()
