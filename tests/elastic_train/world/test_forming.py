"""Forming worlds: what a process does that starts while etcd is away."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from elastic_train.config.schema import Config
from elastic_train.errors import Preempted, StorageError
from elastic_train.system.watchdog import Watchdog
from elastic_train.world import forming
from elastic_train.world.forming import LiveWorlds
from rendezvous.context import LiveContext
from rendezvous.errors import StoreUnavailableError


class Away(Exception):  # noqa: N818 - where the test ends
    """The membership has begun."""


def begin(
    monkeypatch: pytest.MonkeyPatch, *, tries: int, timeout_s: float = 60.0, is_stopped: bool = False
) -> list[object]:
    """Form a world where the first `tries` beginnings of a membership meet no etcd; return those beginnings."""
    begun: list[object] = []

    def member(context: LiveContext, most: int) -> object:
        begun.append(context)
        if len(begun) <= tries:
            raise StoreUnavailableError("no etcd answers")
        raise Away

    monkeypatch.setattr(forming, "LiveMember", member)
    monkeypatch.setattr(forming, "ETCD_PAUSE_S", 0.0)
    context = LiveContext(("127.0.0.1:1",), "job", "n", "h", "127.0.0.1", "h:1", 1, 1, 5.0, 1.0, timeout_s)
    config: Config = SimpleNamespace(batch=SimpleNamespace(num_lanes=8), peer_timeout_s=60.0)  # type: ignore[assignment]
    watchdog: Watchdog = SimpleNamespace(resting=None)  # type: ignore[assignment]
    formed = LiveWorlds(context, config, torch.device("cpu"), watchdog, lambda: is_stopped)
    with pytest.raises(Away):
        formed.form()
    return begun


def test_a_process_that_starts_while_etcd_is_away_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As members do: an agent would count its exit as an error of the worker."""
    assert len(begin(monkeypatch, tries=3)) == 4


def test_the_wait_for_etcd_ends_after_the_join_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is an error, which says where etcd should be."""
    with pytest.raises(StorageError, match="no etcd answers"):
        begin(monkeypatch, tries=1_000_000, timeout_s=0.2)


def test_a_process_waiting_for_etcd_can_be_asked_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for the timeout."""
    with pytest.raises(Preempted, match="while etcd was away"):
        begin(monkeypatch, tries=1_000_000, is_stopped=True)
