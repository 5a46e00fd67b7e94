"""Forming worlds: a process that starts while etcd is down."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.schema import Config
from elastic_train.errors import ConfigError, NoProgressError, PeerLostError, Preempted, StorageError
from elastic_train.system.watchdog import Watchdog
from elastic_train.tracking.history import UnformedWorlds
from elastic_train.world import forming
from elastic_train.world.forming import LiveWorlds, Standstill
from rendezvous.context import LiveContext
from rendezvous.errors import StoreUnavailableError
from rendezvous.membership.records import Closed, Job

PATIENT = Standstill(None, 1.0, lambda: 0)
NOWHERE: UnformedWorlds = SimpleNamespace(note=None)  # type: ignore[assignment]


def a_config() -> Config:
    """Return the parts of a configuration that form worlds."""
    batch = SimpleNamespace(num_lanes=8)
    return SimpleNamespace(batch=batch, peer_timeout_s=60.0, parallel=ParallelConfig())  # type: ignore[return-value]


class Away(Exception):  # noqa: N818 - where the test ends
    """The membership has begun."""


def begin(
    monkeypatch: pytest.MonkeyPatch, *, tries: int, timeout_s: float = 60.0, is_stopped: bool = False
) -> list[object]:
    """Form a world while the first `tries` starts of a membership find no etcd; return these starts."""
    begun: list[object] = []

    def member(context: LiveContext, *_: object, **__: object) -> object:
        begun.append(context)
        if len(begun) <= tries:
            raise StoreUnavailableError("no etcd answers")
        raise Away

    monkeypatch.setattr(forming, "LiveMember", member)
    monkeypatch.setattr(forming, "ETCD_PAUSE_S", 0.0)
    context = LiveContext(("127.0.0.1:1",), "job", "n", "h", "127.0.0.1", "h:1", 1, 1, 5.0, 1.0, timeout_s)
    config = a_config()
    watchdog: Watchdog = SimpleNamespace(resting=None)  # type: ignore[assignment]
    formed = LiveWorlds(context, config, torch.device("cpu"), watchdog, lambda: is_stopped, Job(), PATIENT, NOWHERE)
    with pytest.raises(Away):
        formed.form()
    return begun


def test_a_process_that_starts_while_etcd_is_away_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members do the same: an agent would count its exit as a worker failure."""
    assert len(begin(monkeypatch, tries=3)) == 4


def test_the_wait_for_etcd_ends_after_the_join_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is an error, which says where etcd should be."""
    with pytest.raises(StorageError, match="no etcd answers"):
        begin(monkeypatch, tries=1_000_000, timeout_s=0.2)


def test_a_process_waiting_for_etcd_can_be_asked_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves without waiting for the timeout."""
    with pytest.raises(Preempted, match="while etcd was away"):
        begin(monkeypatch, tries=1_000_000, is_stopped=True)


DONE = Closed(4, 1_700_000_000.0, Job("/runs/a", "digest"))


@pytest.mark.parametrize(
    ("job", "differs"), [(Job("/runs/b", "digest"), "folder"), (Job("/runs/a", "other"), "configuration")]
)
def test_another_job_was_done_under_the_same_run_id(
    monkeypatch: pytest.MonkeyPatch, job: Job, differs: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so and does not report this job as done; if it was the same job, nothing is left to do."""
    ended = SimpleNamespace(next_world=lambda _, *, as_last: None, closed=DONE)
    monkeypatch.setattr(forming, "LiveMember", lambda *_, **__: ended)
    context = LiveContext(("127.0.0.1:1",), "job", "n", "h", "127.0.0.1", "h:1", 1, 1, 5.0, 1.0, 60.0)
    config = a_config()
    watchdog: Watchdog = SimpleNamespace(resting=None)  # type: ignore[assignment]

    def worlds_of(mine: Job) -> LiveWorlds:
        return LiveWorlds(context, config, torch.device("cpu"), watchdog, lambda: False, mine, PATIENT, NOWHERE)

    with pytest.raises(
        ConfigError, match=rf"'job' was finished at 2023-11-14 22:13:20 UTC in /runs/a.*another {differs}"
    ):
        worlds_of(job).form()
    assert worlds_of(DONE.job).form() is None
    assert "was finished at 2023-11-14 22:13:20 UTC in /runs/a: nothing is left to do" in caplog.text


def test_worlds_that_do_not_form_are_counted_logged_with_the_reason_and_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A single failure may be an accident; from the second in a row on it is logged, and the nodes are asked."""
    looks: list[None] = []
    world = SimpleNamespace(rank=0, size=2, store=None, context=SimpleNamespace(term=7, num_nodes=2))
    member = SimpleNamespace(
        next_world=lambda _, *, as_last: world,
        is_broken=None,
        look_for_unreachable=lambda: looks.append(None),
        store=None,
        closed=None,
        published=None,
    )
    monkeypatch.setattr(forming.one_store, "check_before_joining", lambda *_: None)
    tries: list[int] = []

    def group(*_: object, **__: object) -> object:
        tries.append(worlds.num_not_formed)
        if len(tries) < 4:
            raise PeerLostError("connection refused")
        return "a group"

    monkeypatch.setattr(forming, "LiveMember", lambda *_, **__: member)
    monkeypatch.setattr(forming, "Group", group)
    monkeypatch.setattr(forming, "FIRST_PAUSE_S", 0.0)
    noted: list[tuple[object, ...]] = []
    unformed: UnformedWorlds = SimpleNamespace(note=lambda *said: noted.append(said))  # type: ignore[assignment]
    told = LiveContext(("127.0.0.1:1",), "job", "n", "h", "127.0.0.1", "h:1", 1, 1, 5.0, 1.0, 60.0)
    config = a_config()
    watchdog: Watchdog = SimpleNamespace(resting=None, moved=None)  # type: ignore[assignment]
    worlds = LiveWorlds(
        told, config, torch.device("cpu"), watchdog, lambda: False, Job(), Standstill(4, 0.0, lambda: 0), unformed
    )
    formed = worlds.form()
    assert formed is not None and formed.group == "a group"
    assert tries == [0, 1, 2, 3] and worlds.num_not_formed == 0
    assert len(looks) == 2
    assert [record.getMessage().partition(".")[0] for record in caplog.records] == [
        f"{number} worlds in a row did not form, the last of term 7, 2 ranks on 2 nodes: connection refused"
        for number in (2, 3)
    ]
    assert noted == [(7, 0, 2, "connection refused")] * 3
    tries.clear()
    with pytest.raises(
        NoProgressError, match="4 worlds in a row, for 0 s, did not get beyond step 0; the last one: it ended"
    ):
        worlds.form()
