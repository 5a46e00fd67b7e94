"""Why a run stopped: of all that its processes left behind, the one cause, who it was, and what to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_train.core.coverage import CoverageSums
from elastic_train.runs.cause import SILENT_S, cause_of
from elastic_train.tracking import history as history_module
from elastic_train.tracking.history import History, UnformedWorlds, note_failed, note_unfit
from rendezvous.agent.worker_end import UNFINISHED_CODE, await_notes, described, note_end
from tests.elastic_train.tracking.unqueued import Unqueued

OOM = "was killed for memory (cgroup: 1 kill)"


class Left:
    """A run of two ranks that took three steps a second, and what its processes leave as they end, in that order."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now, self._term = folder, 1000.0, 0
        monkeypatch.setattr(time, "time", lambda: self.now)
        self._monkeypatch, self._worlds = monkeypatch, list[History]()

    def train(self, *steps: int, started_at: float = 2.0) -> None:
        """Form a world and apply these steps."""
        self._term += 1
        self._worlds = [History(Unqueued(), self.folder, self._term, rank) for rank in range(2)]
        for world in self._worlds:
            world.form(world=2, cause="begin", joined_at=None, sealed_at=1.0, started_at=started_at)
        for self.step in steps:
            self.now += 1.0
            for rank, world in enumerate(self._worlds):
                world.step(
                    step=self.step,
                    epoch=0,
                    lo=self.step,
                    hi=self.step + 1,
                    lanes=range(rank, rank + 1),
                    num_samples=1,
                    world=2,
                    loss=0.5,
                )
        self.now += 1.0

    def fails(self, rank: int, code: int, why: str, kind: str = "RuntimeError") -> None:
        """A rank says with which error it ends."""
        self.now += 0.1
        self._monkeypatch.setenv("RANK", str(rank))
        note_failed(self.folder, exit_code=code, step=3, kind=kind, why=why)

    def dies(self, rank: int, code: int, how: str | None = None, **more: object) -> None:
        """A rank is killed, and its agent says so, in the file that the rank has named."""
        self.now += 0.1
        facts = {"op": "failed", "term": 0, "of_rank": rank, "of_term": self._term, "host": "a", "pid": rank}
        path = self.folder / "history" / f"failed-{rank:05d}-a-1-boot.jsonl"
        note_end({"path": str(path), "facts": facts}, code, how or described(code), **more)
        await_notes()

    def leaves(self, status: str) -> None:
        """Both ranks end as they were asked to."""
        self.now += 0.1
        for world in self._worlds:
            world.end(status=status, step=self.step, weights_sha256="w", coverage=CoverageSums())


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Left]:
    monkeypatch.setattr(history_module, "BackgroundFiles", Unqueued)
    (tmp_path / "history").mkdir()
    run = Left(tmp_path, monkeypatch)
    run.train(1, 2, 3)
    yield run


LOST = ("a peer is lost", "PeerLostError")


@pytest.mark.parametrize(
    ("ends", "do", "rank", "phrase"),
    [
        (lambda run: run.fails(1, 1, "ValueError: no (task.py, line 3)"), "fix", 1, "ValueError: no (task.py, line 3)"),
        (lambda run: run.fails(1, 65, "row 7 of a.parquet"), "fix", 1, "row 7 of a.parquet"),
        (lambda run: run.fails(0, 2, "data.train: no such folder"), "fix", 0, "data.train: no such folder"),
        (lambda run: run.fails(1, 71, "its products differ"), "leave out", 1, "its products differ"),
        (lambda run: run.fails(1, 93, "3 worlds in a row ended at step 3"), "fix", 1, "3 worlds in a row"),
        (lambda run: run.fails(1, 76, "no step in 60 s"), "start", 1, "no step in 60 s"),
        (lambda run: run.fails(0, 74, "result.json: no space left"), "start", 0, "no space left"),
        (lambda run: run.dies(1, -9, OOM), "fix", 1, OOM),
        (lambda run: run.dies(0, -9), "start", 0, "was killed by SIGKILL (by the system, or by hand)"),
        (lambda run: run.dies(1, -11), "fix", 1, "was killed by SIGSEGV"),
        (lambda run: run.dies(1, -7), "fix", 1, "shared memory (/dev/shm) is full"),
        (lambda run: run.dies(1, UNFINISHED_CODE), "start", 1, "exited with 0 without finishing"),
        (lambda run: run.dies(1, 76), "start", 1, "ended with code 76: it hung, and took no step"),
        (lambda run: run.dies(1, 5), "start", 1, "ended with code 5"),
        (lambda run: (run.fails(0, 1, *LOST), run.dies(1, -9, OOM)), "fix", 1, OOM),
        (lambda run: (run.dies(1, -9), run.fails(0, 79, "state is lost")), "start", 1, "SIGKILL"),
        (lambda run: (run.dies(1, -9), run.fails(0, 77, "1 of 2 nodes came")), "start", 1, "SIGKILL"),
        (lambda run: run.fails(0, 77, "1 of 2 nodes came"), "start", 0, "1 of 2 nodes came"),
        (lambda run: (run.fails(1, 65, "row 7"), run.fails(0, 1, *LOST)), "fix", 1, "row 7"),
        (lambda run: run.leaves("preempted"), "start", None, "the job was asked to leave, and left after step 3"),
        (lambda run: (run.dies(1, -9), run.train(4), run.leaves("left")), "start", None, "asked to leave"),
        (lambda run: (run.dies(1, -9, OOM), run.train(4), run.dies(0, -11)), "fix", 0, "SIGSEGV"),
        (
            lambda run: (run.dies(1, -9, OOM, node_leaves=True), run.train(4), run.leaves("preempted")),
            "fix",
            1,
            "killed for memory",
        ),
        (
            lambda run: (run.dies(1, -9, OOM, node_leaves=True), run.train(4, started_at=run.now + 9.0)),
            "start",
            None,
            "ended without a word after step 4",
        ),
        (lambda run: None, "start", None, "ended without a word after step 3, and so did their launchers"),
    ],
)
def test_a_run_that_stopped_has_one_cause(
    left: Left, ends: Callable[[Left], object], do: str, rank: int | None, phrase: str
) -> None:
    """What was survived is not the cause, and neither is what only followed from it."""
    ends(left)
    cause = cause_of(left.folder, now=left.now + SILENT_S + 60.0)
    assert (cause.do, cause.rank) == (do, rank)
    assert phrase in cause.sentence
    assert cause.step == (4 if "train" in ends.__code__.co_names else 3)
    assert all(Path(path).is_file() for path in cause.evidence) and cause.evidence


def test_a_world_that_did_not_form_is_the_cause_of_what_came_after_the_last_step(left: Left) -> None:
    left.now += 1.0
    UnformedWorlds(Unqueued(), left.folder).note(2, 0, 2, "rank 1 on b cannot be reached at 10.0.0.2")
    cause = cause_of(left.folder, now=left.now + SILENT_S + 60.0)
    assert cause.do == "start" and "no world formed after step 3: rank 1 on b cannot be reached" in cause.sentence


def test_a_run_that_goes_on_has_not_stopped(left: Left) -> None:
    cause = cause_of(left.folder, now=left.now + 5.0)
    assert cause.do == "nothing" and "it seems to be running: step 3 was applied 6 s ago" in cause.sentence


def test_a_machine_that_fails_its_health_check_before_the_first_step_is_to_be_left_out(tmp_path: Path) -> None:
    note_unfit(Unqueued(), tmp_path, "its matrix products differ from those expected")
    cause = cause_of(tmp_path)
    assert (
        cause.do == "leave out"
        and "failed its health check" in cause.sentence
        and f"leave {cause.host} out" in cause.advice
    )


def test_of_a_folder_without_a_word_the_launchers_log_is_named(tmp_path: Path) -> None:
    assert cause_of(tmp_path).advice == "read the log of its launcher"
