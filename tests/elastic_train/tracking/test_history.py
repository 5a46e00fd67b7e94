"""The history: whole lines, readable after any end of the writer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elastic_train.core.coverage import CoverageSums
from elastic_train.errors import StorageError
from elastic_train.tracking.history import (
    History,
    LastApplied,
    last_applied,
    num_without_step,
)


def read_history(run_dir: Path) -> list[dict[str, object]]:
    """Read the lines of all processes, of which only whole ones count."""
    lines = [line for path in sorted((run_dir / "history").iterdir()) for line in path.read_bytes().splitlines()]
    return [json.loads(line) for line in lines if line.endswith(b"}")]


def step(history: History, number: int, world: int = 2) -> None:
    history.step(step=number, epoch=0, lo=number, hi=number + 1, lanes=(0, 4), num_samples=4, world=world, loss=0.5)


def write_all(run_dir: Path) -> None:
    history = History(run_dir, term=3, rank=1)
    history.form(world=2, cause="lost", joined_at=None, sealed_at=1.0, started_at=2.0)
    resumed: dict[str, object] = {"steps_lost": 1}
    history.restore(
        step=4,
        epoch=0,
        offset=4,
        commit="c",
        given_by=None,
        applied_by=None,
        seconds=0.1,
        skipped=[("d", "torn")],
        resumed=resumed,
    )
    step(history, 5)
    history.commit(step=5, key="k", digest="d", parent=None, created_at=1.5, seconds=0.2, stall_s=0.01)
    history.rollback(from_step=5, to_step=4)
    history.end(status="done", step=5, weights_sha256="w", coverage=CoverageSums(4, 1, 2))
    history.close()
    history.close()


def test_every_operation_is_one_line(tmp_path: Path) -> None:
    """Each operation is read back in order, with its term and rank."""
    write_all(tmp_path)
    lines = read_history(tmp_path)
    assert [line["op"] for line in lines] == ["form", "restore", "step", "commit", "rollback", "end"]
    assert {(line["term"], line["rank"]) for line in lines} == {(3, 1)}
    assert lines[2]["lanes"] == [0, 4]
    assert lines[5]["coverage"] == {"count": 4, "sum_a": 1, "sum_b": 2}


@pytest.mark.parametrize("torn", [b'{"op": "step", "t', b"12", b'"a"', b"\xff\xfe{", b"[]", b'{"t": 1}'])
def test_a_torn_line_is_passed_over(tmp_path: Path, torn: bytes) -> None:
    """A line that is torn or foreign is not read, and hides no other line."""
    write_all(tmp_path)
    (path,) = (tmp_path / "history").iterdir()
    path.write_bytes(torn + b"\n" + path.read_bytes() + torn)
    found = last_applied(tmp_path, before_term=4)
    assert found is not None
    assert found.step == 5


def test_the_last_applied_step_is_the_furthest_of_the_newest_earlier_term(tmp_path: Path) -> None:
    """Later and stepless terms do not count; of the ranks the furthest one does."""
    for term, rank, number in [(1, 0, 90), (2, 0, 41), (2, 1, 42), (5, 0, 7)]:
        history = History(tmp_path, term, rank)
        step(history, number, world=term)
        history.close()
    History(tmp_path, 3, 0).close()
    (tmp_path / "history" / "notes-of-mine-x.jsonl").write_text("mine\n")
    found = last_applied(tmp_path, before_term=5)
    assert isinstance(found, LastApplied)
    assert (found.term, found.step, found.world) == (2, 42, 2)
    assert last_applied(tmp_path, before_term=1) is None
    assert last_applied(tmp_path / "none", before_term=1) is None


@pytest.mark.parametrize("num_after", [0, 1, 3000])
def test_a_step_is_found_however_many_lines_follow_it(tmp_path: Path, num_after: int) -> None:
    """The ends of the files are read until a step is in them."""
    history = History(tmp_path, 1, 0)
    for number in range(1, 200):
        step(history, number)
    for _ in range(num_after):
        history.commit(step=199, key="k" * 40, digest="d", parent=None, created_at=1.5, seconds=0.2, stall_s=0.01)
    found = last_applied(tmp_path, before_term=2)
    assert found is not None
    assert found.step == 199


def test_a_line_is_on_the_file_before_the_call_returns(tmp_path: Path) -> None:
    """A reader sees a step at once: a SIGKILL of the writer loses none."""
    history = History(tmp_path, 1, 0)
    for number in range(1, 4):
        step(history, number)
        assert [line["step"] for line in read_history(tmp_path)] == list(range(1, number + 1))


def test_a_full_disk_stops_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line that cannot be written, or not wholly, is counted and reported once; later lines are whole again."""
    history = History(tmp_path, 1, 0)

    def full(file: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        step(history, 1)
        patch.setattr(os, "write", lambda file, content: write(file, content[:3]))
        step(history, 2)
    step(history, 3)
    assert history.num_failures == 2
    assert [line["step"] for line in read_history(tmp_path)] == [3]
    assert caplog.text.count("history has gaps") == 1


def test_a_history_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    """Where nothing can be written from the start, training does not begin."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        History(tmp_path / "file", 1, 0)


def test_the_newest_terms_without_a_step_are_counted(tmp_path: Path) -> None:
    """Up to the last term with a step, or in which the job gave up; other ranks' files do not count."""

    def world(term: int, *, num_steps: int = 0, gives_up: bool = False, rank: int = 0) -> None:
        history = History(tmp_path, term, rank)
        history.form(world=2, cause="lost", joined_at=None, sealed_at=1.0, started_at=2.0)
        for number in range(num_steps):
            step(history, number + 1)
        if gives_up:
            history.no_progress(step=4)
        history.close()

    world(1)
    world(2, num_steps=3)
    world(3)
    world(4)
    world(4, rank=1, num_steps=1)
    assert num_without_step(tmp_path, 5, most=20) == 2
    assert num_without_step(tmp_path, 5, most=1) == 1
    assert num_without_step(tmp_path, 3, most=20) == 0
    world(5, gives_up=True)
    world(6)
    assert num_without_step(tmp_path, 7, most=20) == 1
