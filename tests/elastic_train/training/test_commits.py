"""Commits during training: those due while one is written, failures, and the end of a job or a world."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch

from elastic_train.checkpoint.commits.pruning import prune
from elastic_train.checkpoint.commits.reader import discover, read_record
from elastic_train.checkpoint.commits.record import Improvement
from elastic_train.checkpoint.commits.retention_policies import Retention, pinned
from elastic_train.checkpoint.saving.cadence import Cadence, Faults
from elastic_train.checkpoint.saving.store_health import StoreHealth
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.store import Store
from elastic_train.config.checkpoints import CheckpointConfig
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.accounting import CoverageSums, SampleAccount
from elastic_train.core.lineage import Interval
from elastic_train.core.order import Cursor
from elastic_train.errors import FencedError, SavesFailedError, StorageError
from elastic_train.job.build import build_state
from elastic_train.job.state import StepFacts
from elastic_train.parallel.devices.switches import KeptSwitches
from elastic_train.parallel.group import Group
from elastic_train.system.watchdog import Watchdog
from elastic_train.training import commits as module
from elastic_train.training import loop
from elastic_train.training.commits import LAST_COMMIT_TRIES, Commits
from elastic_train.training.step import Computed
from elastic_train.training.step_sums import StepSums
from elastic_train.world.fencing import JoinedFence, StoreFence
from rendezvous import errors as rendezvous_errors
from tests.conftest import PATIENCE_S
from tests.elastic_train.checkpoint.saving.test_background_saves import FullStore, HeldStore, open_saves


class Ears:
    """The announcements, and the history's commit lines."""

    def __init__(self) -> None:
        self.announced: list[str] = []
        self.commits: list[dict[str, object]] = []

    def commit(self, **fields: object) -> None:
        self.commits.append(fields)

    @property
    def steps(self) -> list[object]:
        return [line["step"] for line in self.commits]


class AwayEtcd:
    """A fence's connection to etcd, which is down at first."""

    def __init__(self) -> None:
        self.is_away = True
        self.published: list[str] = []

    def publish(self, term: int, commit: str) -> None:
        if self.is_away:
            raise rendezvous_errors.StoreUnavailableError("no etcd answers")
        self.published.append(commit)


def opened_on(
    store: Store, *, etcd: AwayEtcd | None = None, give_up_after_s: float = 600.0, **checkpoint: object
) -> tuple[Commits, Ears]:
    """Open the commits of one rank with a tiny model in a store."""
    background, ears = open_saves(store, fence=etcd and JoinedFence(store, etcd)), Ears()  # type: ignore[arg-type]
    config = SimpleNamespace(
        checkpoint=CheckpointConfig(**checkpoint),
        run=SimpleNamespace(seed=1),
        identity=lambda: "config",
        give_up_after="20 worlds",
        give_up_after_s=give_up_after_s,
    )
    plan = SimpleNamespace(
        config=config,
        manifest=SimpleNamespace(digest="manifest", num_rows=9),
        sources=(),
        order=SimpleNamespace(block_row_groups=8, arrangement=None),
        num_lanes=8,
        micro_batch=8,
        device=torch.device("cpu"),
    )
    world = SimpleNamespace(
        group=Group(0, 1, None, 1.0), is_leader=True, term=1, store=store, history=ears, announce=ears.announced.append
    )
    commits = Commits(
        plan=plan,  # type: ignore[arg-type]
        world=world,  # type: ignore[arg-type]
        state=build_state(torch.nn.Linear(3, 2), OptimizerConfig(), 100, "cpu", is_fp16=False),
        watchdog=Watchdog(),
        saves=background,
        cadence=Cadence(config.checkpoint, Faults(0, 0.0)),
        tracker=None,
        head=None,
        use=StoreHealth(store.url),
    )
    return commits, ears


def take_step(commits: Commits) -> None:
    """Take a step as the loop does, up to the step's boundary."""
    commits.state.model(torch.ones(1, 3)).sum().backward()
    commits.await_staging()
    commits.state.apply(
        StepFacts(Cursor(), CoverageSums(), commits.world.term, SampleAccount()), commits.state.measure()
    )
    commits.collect()


def save(commits: Commits) -> None:
    """Commit the applied state and wait for the outcome."""
    commits.begin(is_any_busy=False)
    commits._take(commits.saves.wait())


def let_through(store: HeldStore, after_s: float = 0.0) -> None:
    store.may_create.set()
    threading.Timer(after_s, store.may_write.set).start() if after_s else store.may_write.set()


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_train.checkpoint.saving.save_thread.RETRY_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr("elastic_train.training.commits.LAST_COMMIT_PAUSE_S", 0.0)


def test_a_commit_due_while_one_is_written_is_skipped_and_counted(tmp_path: Path) -> None:
    """The next commit continues the one that was in flight, with the right intervals; the history records each once."""
    store = HeldStore(tmp_path)
    commits, ears = opened_on(store)
    for _ in range(2):
        take_step(commits)
        commits.begin(is_any_busy=commits.is_busy)
    assert commits.num_skipped == 1 and "step 2 skipped (1 so far)" in ears.announced[0] and ears.steps == []
    for _ in range(9):
        commits.begin(is_any_busy=True)
    assert len(ears.announced) == 2 and "(10 so far)" in ears.announced[1]
    let_through(store)
    take_step(commits)
    commits.finish()
    first, last = ears.commits
    assert ears.steps == [1, 3] and last["parent"] == first["digest"]
    head = discover(store).head
    assert head is not None and head.step == 3 and head.intervals == (Interval(1, 0, 3),)


def test_memory_for_saves_is_made_for_a_state_as_it_is_after_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once per world, and for a GPU's state as it is saved; an optimizer without a step may hold nothing yet."""
    commits, _ = opened_on(LocalStore(tmp_path))
    prepared: list[object] = []
    monkeypatch.setattr(commits.saves, "prepare", lambda state, dims: prepared.append(state))
    take_step(commits)
    saved = commits.state.pieces.tree()
    monkeypatch.setattr(type(commits.state.pieces), "tree", lambda pieces: saved)
    commits.prepare()
    assert not prepared
    commits.plan.device = torch.device("cuda")  # type: ignore[misc]
    for _ in range(2):
        commits.prepare()
        take_step(commits)
    assert len(prepared) == 1 and prepared[0] is saved, "in cells tensors are in pieces, of which each has a writer"


@pytest.mark.parametrize(("every", "is_best"), [("1 step", False), ("50 steps", True)])
def test_a_due_commit_can_wait_for_the_one_in_flight(tmp_path: Path, every: str, is_best: bool) -> None:
    """A job that commits every step skips none, and no job skips the best state, which is in no later commit."""
    store = HeldStore(tmp_path)
    commits, ears = opened_on(store, every=every)
    take_step(commits)
    commits.begin(is_any_busy=False)
    take_step(commits)
    let_through(store, after_s=0.1)
    commits.begin(is_any_busy=True, is_best=is_best)
    commits.finish()
    assert ears.steps == [1, 2] and commits.num_skipped == 0 and ears.announced == []


def test_a_job_ends_after_the_save_in_flight(tmp_path: Path) -> None:
    """The last commit follows it, has the last step, and is complete when the call returns."""
    store = HeldStore(tmp_path)
    commits, ears = opened_on(store)
    take_step(commits)
    commits.begin(is_any_busy=False)
    take_step(commits)
    commits.tracker = MagicMock()
    let_through(store, after_s=0.1)
    commits.finish()
    assert ears.steps == [1, 2] and ears.commits[1]["parent"] == ears.commits[0]["digest"]
    assert [call.args[0] for call in commits.tracker.log.call_args_list] == [1, 2], "both are noted at step 2"
    assert discover(store).head == commits.head


def test_saves_that_fail_in_a_row_end_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failure is counted and shown, a success resets the count, and too many failures in a row end training."""
    monkeypatch.setattr(module, "MOST_FAILED", 3)
    store = FullStore(tmp_path, 3 * 2)
    commits, ears = opened_on(store, give_up_after_s=0)
    for number in range(1, 7):
        assert not commits.is_hopeless()
        take_step(commits)
        save(commits)
        if number == 3:
            assert ears.steps == [3] and commits.num_failed == 2
            store.num_left = 1000
    assert commits.is_hopeless() and commits.num_failed == 5
    assert (
        "commit at step 6 FAILED (5 so far), training continues" in ears.announced[-1]
        and "No space left" in ears.announced[-1]
    )
    error = commits.failed()
    assert isinstance(error, SavesFailedError) and error.exit_code == StorageError.exit_code
    assert "at least 3 saves in a row have failed" in str(error) and str(tmp_path) in str(error)
    with pytest.raises(StorageError, match=r"could not be committed in 3 tries: .*No space left"):
        commits.finish()
    assert [entry.key.split("/")[1] for entry in store.list("data/")] == ["step-000000000003"] * 2


@pytest.mark.heavy
def test_an_outage_is_outlasted_however_many_saves_fail_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing credentials for 25 s, with a save a second, end nothing; ten minutes do. A failed commit starts over."""
    store = FullStore(tmp_path, 10**6)
    commits, _ = opened_on(store)
    now = 1000.0
    monkeypatch.setattr("elastic_train.training.commits.time", SimpleNamespace(monotonic=lambda: now))
    for _ in range(25):
        take_step(commits)
        save(commits)
        assert not commits.is_hopeless()
        now += 1
    now = 1600.0
    assert commits.is_hopeless()
    store.num_left = 0
    take_step(commits)
    save(commits)
    assert not commits.is_hopeless()
    store.num_left = 10**6
    for _ in range(10):
        take_step(commits)
        save(commits)
    assert not commits.is_hopeless()


def test_commits_missing_from_etcd_are_not_failures(tmp_path: Path) -> None:
    """The store has them; the first commit after the outage is their child, and the only one published to etcd."""
    etcd = AwayEtcd()
    commits, ears = opened_on(LocalStore(tmp_path), etcd=etcd, give_up_after_s=0)
    for number in range(1, 5):
        take_step(commits)
        save(commits)
        assert ears.steps == [] and not commits.is_hopeless() and commits.num_failed == 0
        assert f"the commit of step {number} is saved, but not yet known to etcd" in ears.announced[-1]
    etcd.is_away = False
    take_step(commits)
    save(commits)
    assert ears.steps == [5] and len(etcd.published) == 1 and len(ears.announced) == 4
    head = discover(LocalStore(tmp_path)).head
    assert head is not None
    assert (head.key, head.parent_key) == (etcd.published[0], head.key.replace("5.json", "4.json"))


def test_a_job_can_end_without_etcd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No later commit could publish the last one, so after some attempts being in the store is enough."""
    monkeypatch.setattr("elastic_train.training.commits.LAST_COMMIT_PAUSE_S", 0.01)
    commits, ears = opened_on(LocalStore(tmp_path), etcd=AwayEtcd())
    take_step(commits)
    commits.finish()
    assert ears.steps == [1] and commits.head == discover(LocalStore(tmp_path)).head
    assert len(ears.announced) == LAST_COMMIT_TRIES


def test_what_a_loss_changes_of_kernels_and_modes_is_named_and_set_back_at_the_next_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commits, _ = opened_on(LocalStore(tmp_path))
    model = commits.state.model
    commits.switches = KeptSwitches(model)

    def meddle(module: torch.nn.Module, inputs: object) -> None:
        if commits.state.step == 1:
            torch.set_float32_matmul_precision("medium")
            module.eval()

    model.register_forward_pre_hook(meddle)
    for _ in range(2):
        take_step(commits)
        save(commits)
    precision, mode = (record.getMessage() for record in caplog.records if "is set back" in record.getMessage())
    assert "set_float32_matmul_precision was changed from highest to medium" in precision
    assert "training mode of 1 modules was changed from True to False" in mode
    assert all(
        "after step 1, by the task or a library, and is set back at step 2" in line for line in (precision, mode)
    )
    assert torch.get_float32_matmul_precision() == "highest" and model.training
    assert torch.backends.cuda.matmul.fp32_precision == "none"


def test_an_existing_commit_is_not_written_again(tmp_path: Path) -> None:
    """Asked to leave while etcd is down: rank 0 retries etcd, and no rank uploads the state again."""
    commits, _ = opened_on(LocalStore(tmp_path))
    take_step(commits)
    save(commits)
    answers = iter([[False, False], [False, True], [False, True], [True, True]])
    group = SimpleNamespace(rank=1, size=2, check=None, broadcast_object=lambda *_: {"value": next(answers)})
    group.all_gather = lambda tensor: torch.stack([tensor, tensor])
    commits.world.group, commits.world.is_leader = group, False  # type: ignore[assignment,misc]
    commits.saves = MagicMock(wait=lambda check: None)
    commits.finish()
    assert commits.saves.begin.call_count == 1 and not list(answers)


@pytest.mark.parametrize("before", [Improvement("min loss", 2.0, 0, 0), None], ids=["a later one", "the first one"])
def test_a_job_whose_last_validation_came_after_the_last_commit_commits_it(
    tmp_path: Path, before: Improvement | None
) -> None:
    """A fault kept the validation from coming first; export and evaluate learn from the last commit which is best."""
    store = LocalStore(tmp_path)
    commits, _ = opened_on(store)
    take_step(commits)
    commits.state.reached = replace(commits.state.reached, improvement=before)
    commits.finish()
    for best in (before, (before or Improvement("min loss")).after(1, 1.0, 0.0)):
        again, _ = opened_on(store)
        again.world.term, again.head, again.state = again.saves._term, commits.head, commits.state  # type: ignore[misc]
        again.state.reached = replace(again.state.reached, improvement=best)
        again.finish()
        found = discover(store).head
        assert found is not None and (found.step, found.improvement) == (1, best)
        assert (found.term > 1) == (best is not before)


def test_a_process_fenced_in_the_store_fails_even_without_etcd(tmp_path: Path) -> None:
    """The claims in the store alone show that a newer world exists."""
    store = LocalStore(tmp_path)
    commits, ears = opened_on(store, etcd=AwayEtcd())
    take_step(commits)
    StoreFence(store).claim()
    with pytest.raises(FencedError, match="term 2 was claimed"):
        commits.finish()
    assert ears.steps == []


@pytest.mark.parametrize("is_live", [True, False])
def test_a_regrouping_world_abandons_its_save_and_an_ending_process_waits_for_it(tmp_path: Path, is_live: bool) -> None:
    """Survivors hold the state and continue at once; an exiting process waits, so the job resumes from its save."""
    store = HeldStore(tmp_path)
    commits, ears = opened_on(store)
    take_step(commits)
    commits.begin(is_any_busy=False)
    assert store.is_writing.wait(PATIENCE_S)
    if not is_live:
        let_through(store, after_s=0.1)
    commits.abandon(is_live=is_live)
    let_through(store)
    head = discover(LocalStore(tmp_path)).head
    assert ears.steps == ([] if is_live else [1]) and (head is None) == is_live


@pytest.mark.parametrize(("flags", "num_commits"), [(loop.COMMIT, 3), (loop.COMMIT | loop.BUSY, 0)])
def test_an_overdue_commit_waits_until_no_rank_is_saving(
    monkeypatch: pytest.MonkeyPatch, flags: int, num_commits: int
) -> None:
    """A rank that abandoned its save asks again at every step, and no step counts as a skipped commit."""
    sums = StepSums(0.0, 1.0, CoverageSums(), 0, 0, flags)
    monkeypatch.setattr(loop, "compute_step", lambda *_: Computed(sums, flags, ()))
    monkeypatch.setattr(loop, "validate", lambda *_, **__: None)
    session = MagicMock(is_over=False, is_best=False)
    session.leave.dropping.return_value = [()] * 3
    session.leaving.return_value = [False]
    session.clock.lap.return_value = 0.0
    session.world.group.all_gather.return_value = torch.zeros(1, 1)
    session.state.reached.cursor.epoch = session.plan.order.advance.return_value.epoch = 0
    session.is_validation_due.return_value = session.commits.is_due.return_value = False
    assert loop.train_steps(session) is loop.Outcome.DONE
    assert session.commits.begin.call_count == num_commits
    session.is_best = True
    assert loop.train_steps(session) is loop.Outcome.DONE
    assert session.commits.begin.call_args == call(is_any_busy=bool(flags & loop.BUSY), is_best=True)


def no_records(store: HeldStore, key: str, content: bytes) -> None:
    if key.startswith("commits/"):
        raise StorageError("it is full")
    LocalStore.create(store, key, content)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_what_is_pinned_is_the_newest_commit_that_will_be_there(
    tmp_path: Path, fails: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save in flight that succeeds deletes the previous head, so its own commit is pinned; otherwise the head is."""
    store = HeldStore(tmp_path)
    commits, _ = opened_on(store)
    commits.saves._tidy = lambda commit: (prune(store, Retention.of(last=1), newest=commit), None)[1]
    let_through(store)
    take_step(commits)
    save(commits)
    store.may_write.clear(), store.is_writing.clear()
    take_step(commits)
    commits.begin(is_any_busy=False)
    assert store.is_writing.wait(PATIENCE_S)
    commits.pin_newest()
    if fails:
        monkeypatch.setattr(HeldStore, "create", no_records)
    let_through(store)
    if ends:
        commits.abandon(is_live=False)
    else:
        commits._take(commits.saves.wait())
    monkeypatch.setattr(HeldStore, "create", LocalStore.create)
    for _ in range(0 if ends else 2):
        take_step(commits)
        save(commits)
    [key] = pinned(store)
    assert read_record(store, key).step == (1 if fails else 2)


def test_a_head_is_pinned_at_once_while_nothing_is_saved(tmp_path: Path) -> None:
    """This includes the time when the save has ended and its outcome is not yet known."""
    store = LocalStore(tmp_path)
    commits, _ = opened_on(store)
    commits.pin_newest()
    assert pinned(store) == set()
    take_step(commits)
    commits.begin(is_any_busy=False)
    assert commits.saves._flight is not None and commits.saves._flight.ended.wait(PATIENCE_S)
    commits.pin_newest()
    assert {read_record(store, key).step for key in pinned(store)} == {1}
