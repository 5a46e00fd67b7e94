"""Worlds form or are given up, and their ranks agree on what each of them says."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from chaos.tasks.paced_classifier import PacedClassifier
from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.schema import Config
from elastic_train.core.keyed_random import SampleRandom
from elastic_train.errors import ConfigError, DataError, NoProgressError, PeerLostError, Preempted, StorageError
from elastic_train.parallel.group import Group
from elastic_train.system.watchdog import Watchdog
from elastic_train.tracking.history import UnformedWorlds
from elastic_train.world import agreement, forming
from elastic_train.world.agreement import NUM_READY, heard, say_why
from elastic_train.world.forming import LiveWorlds, Standstill
from rendezvous.context import LiveContext
from rendezvous.errors import StoreUnavailableError
from rendezvous.membership.records import Closed, Job
from rendezvous.membership.rules.cells import CellShape
from tests.conftest import PATIENCE_S, start
from tests.elastic_train.training.live.test_live import write_config

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


@pytest.mark.parametrize(("shards", "copies"), [("none", None), ("optimizer", 3)])
def test_a_membership_knows_how_many_members_hold_each_shard(
    monkeypatch: pytest.MonkeyPatch, shards: str, copies: int | None
) -> None:
    """Members wait for one that may hold the last copy of a shard; without shards, each holds all of its part."""
    config, cells = a_config(), list[CellShape]()

    def member(*_: object, cell: CellShape, **__: object) -> object:
        cells.append(cell)
        raise Away

    monkeypatch.setattr(forming, "LiveMember", member)
    vars(config)["parallel"] = ParallelConfig(shards=shards, copies=3)  # type: ignore[arg-type]
    context = LiveContext(("127.0.0.1:1",), "job", "n", "h", "127.0.0.1", "h:1", 1, 1, 5.0, 1.0, 60.0)
    watchdog: Watchdog = SimpleNamespace(resting=None)  # type: ignore[assignment]
    with pytest.raises(Away):
        LiveWorlds(context, config, torch.device("cpu"), watchdog, lambda: False, Job(), PATIENT, NOWHERE).form()
    assert [cell.copies for cell in cells] == [copies]


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


BAD = 200
KINDS = {"DataError": DataError, "ValueError": ValueError}


class Choosy(PacedClassifier):
    """Rejects one row of the second epoch, which the inspection before the first step does not find."""

    def __init__(self, *, kind: str, by: int | None = None, **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        self._kind, self._by = KINDS[kind], by

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64], draw: SampleRandom) -> dict[str, Tensor]:  # type: ignore[override]
        if draw.epoch == 1 and (BAD in ids if self._by is None else os.environ["RANK"] == str(self._by)):
            raise self._kind(f"sample {BAD}: its label is a comet")
        return super().collate(rows, ids, draw)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "by", "codes", "sentence"),
    [
        ("DataError", None, {65}, "train: sample 200 (part-1.parquet, row group 5, row 4): its label is a comet"),
        ("ValueError", None, {1}, "ValueError: sample 200: its label is a comet"),
        ("ValueError", 0, {1}, "ValueError: sample 200: its label is a comet"),
    ],
    ids=["an error that names a row", "an unforeseen one", "one of the rank that hosts the store"],
)
def test_all_ranks_end_with_the_sentence_of_the_one_that_found_a_bad_row(
    tmp_path: Path, rows: Path, kind: str, by: int | None, codes: set[int], sentence: str
) -> None:
    """Otherwise two of three ranks would exit with 1 and gloo's message."""
    config = write_config(tmp_path, rows, 60, lane_ms=0.0)
    task = ["--task.path", f"{__name__}:Choosy", "--task.params.kind", kind]
    task += [] if by is None else ["--task.params.by", str(by)]
    done = start([config, *task], num_ranks=3)
    assert set(done.codes) == codes, done.output
    assert sum(sentence in line for line in done.output.splitlines() if "rror: " in line) >= 3, done.output
    assert "gloo" not in done.output and "GLHF" not in done.output, done.output
    if kind == "DataError":
        assert "Traceback" not in done.output, done.output


def test_a_rank_whose_peer_says_nothing_keeps_its_own_error() -> None:
    """A killed peer reports nothing; and a world of one has no peers."""
    group = Group(0, 1, None, 60)
    lost = group.lost("Connection closed by peer")
    assert heard(group, lost) is lost
    group.store = HashStore()
    assert heard(group, lost) is lost
    say_why(group, RuntimeError("no memory"))
    why = heard(group, lost)
    assert isinstance(why, PeerLostError) and str(why) == "rank 0 of 1 has ended: RuntimeError: no memory"


def test_the_rank_that_may_host_the_store_stays_until_all_have_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its peers find no store, and end with an error of the network."""
    store, pauses = HashStore(), threading.Semaphore(0)
    groups: list[Any] = [SimpleNamespace(rank=rank, size=2, store=store, abandon=lambda: None) for rank in range(2)]
    monkeypatch.setattr(agreement, "READY_S", PATIENCE_S)
    monkeypatch.setattr(agreement, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pauses.release()))
    with ThreadPoolExecutor(1) as pool:
        saying = pool.submit(say_why, groups[0], RuntimeError("no memory"))
        assert pauses.acquire(timeout=PATIENCE_S) and not saying.done()
        assert "rank 0 of 2 has ended: RuntimeError: no memory" in str(heard(groups[1], PeerLostError("closed")))
        assert store.add(NUM_READY, 0) == 2
        saying.result(PATIENCE_S)
