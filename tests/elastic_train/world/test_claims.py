"""A claim by another run id: its job is looked for, and a job that it has fenced off ends with an explanation."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic_train.checkpoint.stores.open import open_store
from elastic_train.errors import FencedError, OtherJobError
from elastic_train.system.process_identity import process_identity
from elastic_train.world import claims
from elastic_train.world.claims import Claim, Own, Rivals, read_claim, term_key
from elastic_train.world.fencing import JoinedFence, StoreFence
from rendezvous.process_table import stat_of
from tests.conftest import PATIENCE_S


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "LOOK_S", 0.1)
    monkeypatch.setattr(claims, "PATIENCE_S", 1.0)


def fence_of(
    folder: Path, run_id: str, last_term: int = 0, num_members: Callable[[str], int] = lambda _: 0
) -> StoreFence:
    store = open_store(str(folder))
    own = Own(run_id)
    return StoreFence(store, own, Rivals(store, str(folder), own, last_term, num_members).check)


def claim_as(folder: Path, term: int, **fields: object) -> None:
    """Claim a term as another process does."""
    claim = {"run_id": "first", "pid": 1, **process_identity(), "born": 0, "at": time.time(), **fields}
    open_store(str(folder)).create(term_key(term), json.dumps(claim).encode())


def train_meanwhile(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let another job's history grow while a claim waits."""
    history = folder / "history" / "00000001-00000-x.jsonl"
    history.parent.mkdir()

    def train(seconds: float) -> None:
        time.sleep(seconds)
        with history.open("a") as file:
            file.write("{}\n")

    patch.setattr(claims, "time", SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=train))


def test_a_claim_says_whose_it_is(tmp_path: Path) -> None:
    assert fence_of(tmp_path, "first").claim() == 1
    claim = read_claim(open_store(str(tmp_path)), 1)
    assert (claim.run_id, claim.pid, claim.host) == ("first", os.getpid(), process_identity()["host"])
    assert claim.is_of("first") and not claim.is_of("second")


def test_a_job_that_died_is_continued_under_another_run_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its scheduler restarted it under a new id: it reports what it found, and trains."""
    fence_of(tmp_path, "first").claim()
    assert fence_of(tmp_path, "second").claim() == 2
    assert "the job of run id 'first'" in caplog.text and "this job continues in its place" in caplog.text


@pytest.mark.parametrize("content", ['{"term": 1, "status": "done"}', '{"term": 2, "status": "preempted"}', "{", None])
def test_a_job_that_has_said_its_end_is_continued_without_a_look_or_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    """Each start of `launch` has another run id, and a job that ended properly needs no sign of life."""
    looks = list[float]()
    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=looks.append)
    for term in (1, 2):
        claim_as(tmp_path, term)
    if content is not None:
        (tmp_path / "result.json").write_text(content)
    monkeypatch.setattr(claims, "time", clock)
    has_ended = content is not None and '"term": 2' in content
    assert fence_of(tmp_path, "second").claim() == 3
    assert (not looks, "continues in its place" not in caplog.text) == (has_ended, has_ended)


@pytest.mark.slow
def test_members_in_etcd_are_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead job's leases expire while the second one looks; a running job's do not."""
    fence_of(tmp_path, "first").claim()
    with pytest.raises(OtherJobError, match=r"run id 'first'.* is at work here.* run.dir") as refused:
        fence_of(tmp_path, "second", num_members=lambda run_id: int(run_id == "first")).claim()
    assert refused.value.exit_code == 2
    monkeypatch.setattr(claims, "PATIENCE_S", PATIENCE_S)
    answers = iter([2, 1, 0])
    assert fence_of(tmp_path, "second", num_members=lambda _: next(answers)).claim() == 2


def test_a_second_process_in_a_folder_is_not_sent_to_an_etcd_that_is_not_there(tmp_path: Path) -> None:
    """Single processes have no run id and no etcd."""
    rivals = Rivals(open_store(str(tmp_path)), str(tmp_path), Own("", "", lambda: 0), 0, lambda run_id: 0)
    assert rivals._way_to_join(Claim(term=1, run_id="", etcd="")) == ""
    assert "--endpoint a:1" in rivals._way_to_join(Claim(term=1, run_id="", etcd="a:1"))


@pytest.mark.slow
def test_a_history_that_grows_is_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job has its own etcd. The history has a new line at every look, however busy the machine is."""
    fence_of(tmp_path, "first").claim()
    with monkeypatch.context() as working, pytest.raises(OtherJobError, match="is at work here"):
        train_meanwhile(tmp_path, working)
        fence_of(tmp_path, "second").claim()
    assert fence_of(tmp_path, "second").claim() == 2


def test_a_job_of_long_steps_is_looked_at_for_two_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its history has no new line for twenty seconds; a second job that looked for three took its folder over."""
    monkeypatch.setattr(claims, "LOOK_S", 3.0)
    fence_of(tmp_path, "first").claim()
    lines = [{"op": "step", "step": step, "t": 1e9 + 20.0 * step} for step in range(4)]
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / "00000001-00000-x.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    looks = list[float]()
    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=looks.append)
    monkeypatch.setattr(claims, "time", clock)
    assert (fence_of(tmp_path, "second").claim(), looks) == (2, [40.0])


@pytest.mark.slow
def test_claims_are_signs_of_life_if_the_history_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the history may be deleted between its listing and the look at its size."""
    fence_of(tmp_path, "first").claim()
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / "deleted.jsonl").symlink_to("nowhere")
    terms = itertools.count(2)

    def claim_meanwhile(seconds: float) -> None:
        time.sleep(seconds)
        claim_as(tmp_path, next(terms))

    monkeypatch.setattr(
        claims, "time", SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=claim_meanwhile)
    )
    with pytest.raises(OtherJobError, match="is at work here"):
        fence_of(tmp_path, "second").claim()


def test_a_job_that_was_fenced_off_by_another_ends(tmp_path: Path) -> None:
    """It ends at its next publish or claim; another process of its own job only starts a newer world."""
    first, second = fence_of(tmp_path, "first"), fence_of(tmp_path, "second")
    first.claim()
    assert fence_of(tmp_path, "first").claim() == 2
    with pytest.raises(FencedError):
        first.publish(1, "commits/1")
    second.claim()
    with pytest.raises(
        OtherJobError,
        match=r"run id 'second'.* has claimed term 3 at 20\d\d-\d\d-\d\d .* UTC, above term 2 of this job",
    ) as ended:
        first.publish(2, "commits/2")
    assert ended.value.exit_code == 2
    with pytest.raises(OtherJobError, match="this one ends"):
        fence_of(tmp_path, "first", last_term=2).claim()


def test_processes_without_a_launcher_are_told_apart(tmp_path: Path) -> None:
    """The second one does not wait: it can see whether the first one's process is alive."""
    fence_of(tmp_path, "").claim()
    assert fence_of(tmp_path, "").claim() == 2
    claim_as(tmp_path, 3, run_id="", pid=os.getpid())  # claim of an earlier process with this pid
    assert fence_of(tmp_path, "").claim() == 4
    claim_as(tmp_path, 5, run_id="", pid=os.getppid(), born=_born(os.getppid()))
    with pytest.raises(OtherJobError, match=f"process {os.getppid()} on .* is at work here"):
        fence_of(tmp_path, "").claim()


@pytest.mark.slow
def test_a_process_in_another_container_is_not_looked_for_among_the_own_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers on the host's network have its name, and each counts its processes from 1."""
    fence = fence_of(tmp_path, "")
    claim_as(tmp_path, 1, run_id="", pid=os.getpid(), space=f"{process_identity()['boot']}-1")
    train_meanwhile(tmp_path, monkeypatch)
    with pytest.raises(OtherJobError, match=f"process {os.getpid()} on .* is at work here"):
        fence.claim()


class Etcd:
    """An etcd, as a fence, that may lose its data."""

    def __init__(self) -> None:
        self.newest: int | None = None

    def claim(self, at_least: int) -> int:
        self.newest = max(at_least, (self.newest or 0) + 1)
        return self.newest

    def head(self) -> SimpleNamespace | None:
        return None if self.newest is None else SimpleNamespace(term=self.newest, commit=None)

    def publish(self, term: int, commit: str) -> None:
        assert term == self.newest

    def num_members(self, run_id: str) -> int:
        return 1  # this process


def joined(folder: Path, etcd: Etcd, where: str, last_term: int = 0) -> JoinedFence:
    """Return the fence of job `one` with an etcd, for a process that has trained up to a term."""
    store, own = open_store(str(folder)), Own("one", where, etcd.head)
    return JoinedFence(store, etcd, own, Rivals(store, str(folder), own, last_term, etcd.num_members).check)  # type: ignore[arg-type]


@pytest.mark.slow
def test_jobs_of_one_run_id_on_two_etcds_are_two_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each would fence the other off at every commit, and both would train all steps without a message."""
    here, there = Etcd(), Etcd()
    first = joined(tmp_path, here, "a:1")
    assert first.claim(1) == 1 and joined(tmp_path, here, "a:1").claim(2) == 2, "its next process, which looks for none"
    with monkeypatch.context() as working, pytest.raises(OtherJobError) as refused:
        train_meanwhile(tmp_path, working)
        joined(tmp_path, there, "b:1").claim(1)
    assert "'one' on etcd a:1" in str(refused.value) and "its etcd (--endpoint a:1) to be part of it" in str(
        refused.value
    )
    assert joined(tmp_path, there, "b:1").claim(1) == 3, "the first was frozen meanwhile"
    for act in (lambda: first.publish(2, "commits/2"), lambda: joined(tmp_path, here, "a:1", last_term=2).claim(3)):
        with pytest.raises(OtherJobError, match=r"'one' on etcd b:1 .* has claimed term 3 .*this one ends"):
            act()


def test_a_job_whose_etcd_has_lost_its_data_is_the_same_job(tmp_path: Path) -> None:
    """A job for which a leaving process has committed, under a term unknown to etcd, is the same job as well."""
    etcd = Etcd()
    frozen = joined(tmp_path, etcd, "a:1")
    assert frozen.claim(1) == 1 and joined(tmp_path, etcd, "a:1", last_term=1).claim(2) == 2
    etcd.newest = None
    with pytest.raises(FencedError):
        frozen.publish(1, "commits/1")
    assert joined(tmp_path, etcd, "a:1", last_term=2).claim(1) == 3
    assert StoreFence(open_store(str(tmp_path)), Own("one")).claim() == 4
    with pytest.raises(FencedError):
        frozen.publish(3, "commits/3")
    assert joined(tmp_path, etcd, "a:1").claim(1) == 5


def test_an_etcd_of_another_address_that_knows_a_claims_term_is_the_same_etcd() -> None:
    """An etcd without any term tells nothing: it may have been started anew."""
    claim, etcd = Claim(4, run_id="one", host="elsewhere", etcd="a:1"), Etcd()
    own = Own("one", "b:1", etcd.head)
    assert own.has(claim) and not own.has(claim, otherwise=False)
    etcd.newest = 3
    assert not own.has(claim)
    etcd.newest = 4
    assert own.has(claim, otherwise=False)


def test_a_claim_of_an_older_version_is_anybodys(tmp_path: Path) -> None:
    open_store(str(tmp_path)).create(term_key(1), b'{"host": "a", "pid": 1, "at": 0, "claim": "x"}')
    assert fence_of(tmp_path, "second").claim() == 2


def _born(pid: int) -> int:
    stat = stat_of(pid)
    assert stat is not None
    return stat.born
