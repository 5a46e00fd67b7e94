"""Old histories go, and what recovery asks of them stays the same, whenever the process that prunes dies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_train.checkpoint.interval.cadence import Faults
from elastic_train.checkpoint.interval.measured import faults_before
from elastic_train.system import atomic_files
from elastic_train.system.file_locks import locked_by
from elastic_train.tracking import history
from elastic_train.tracking.history import History
from elastic_train.tracking.history_files import (
    EVERY_TERMS,
    FOLDER,
    LOCK,
    SUMMARY,
    last_applied,
    prune,
    summary_of,
    term_of,
)
from tests.elastic_train.tracking.unqueued import Unqueued, add_restore

KEPT = 12
NUM_TERMS = 30


class Died(Exception):  # noqa: N818 - stands for the end of a process
    """The process died here."""


@pytest.fixture(autouse=True)
def _seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line is written a second after the one before it, so that all that is summed is exact."""
    clock = itertools.count(1_000_000)
    monkeypatch.setattr(history, "time", type("Time", (), {"time": staticmethod(lambda: float(next(clock)))}))


def write_terms(run_dir: Path, terms: range) -> None:
    """Write two ranks' histories of each term; every third term has lost steps at its start."""
    for term, rank in itertools.product(terms, range(2)):
        lines = History(Unqueued(), run_dir, term, rank)
        add_restore(lines, term, 2 if term % 3 == 0 else 0)
        for step in range(term % 5):
            lines.step(step=term + step, epoch=0, lo=0, hi=1, lanes=range(4), num_samples=4, world=2, loss=0.5)
        lines.close()


def answers(run_dir: Path) -> tuple[Faults, object]:
    return faults_before(run_dir, NUM_TERMS + 1), last_applied(run_dir, NUM_TERMS + 1)


def terms_left(run_dir: Path) -> set[int]:
    return {term_of(path) for path in (run_dir / FOLDER).glob("[0-9]*.jsonl")}


def test_answers_stay_the_same_whatever_is_pruned(tmp_path: Path) -> None:
    """The newest terms' files are left; faults and the time that was trained are those of all of them."""
    write_terms(tmp_path, range(1, NUM_TERMS + 1))
    before = answers(tmp_path)
    assert before[0] == Faults(NUM_TERMS // 3, float(sum(term % 5 for term in range(1, NUM_TERMS + 1))))
    prune(tmp_path, NUM_TERMS, KEPT)
    assert terms_left(tmp_path) == set(range(NUM_TERMS - KEPT + 1, NUM_TERMS + 1))
    assert answers(tmp_path) == before
    assert summary_of(tmp_path).pruned == NUM_TERMS - KEPT


def test_it_is_done_every_few_terms(tmp_path: Path) -> None:
    """Most worlds look at the summary only; nothing grows beyond what is kept and those few terms."""
    told = []
    for term in range(1, 6 * EVERY_TERMS):
        write_terms(tmp_path, range(term, term + 1))
        prune(tmp_path, term, KEPT)
        told.append(summary_of(tmp_path).pruned)
        assert len(terms_left(tmp_path)) <= KEPT + EVERY_TERMS
    assert sorted(set(told)) == list(range(0, told[-1] + 1, EVERY_TERMS))


@contextmanager
def dying_after(monkeypatch: pytest.MonkeyPatch, num_acts: int) -> Iterator[list[str]]:
    """Let the process die before its next change of a file, after so many."""
    done: list[str] = []

    def counted(act: Callable[..., object]) -> Callable[..., object]:
        def acting(*args: object, **kwargs: object) -> object:
            if len(done) == num_acts:
                raise Died
            done.append(getattr(act, "__name__", ""))
            return act(*args, **kwargs)

        return acting

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", counted(Path.unlink))
        patch.setattr(Path, "replace", counted(Path.replace))
        patch.setattr(atomic_files.Path, "write_text", counted(Path.write_text))
        yield done


@pytest.mark.slow
def test_whenever_it_dies_no_answer_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A death before each single change of a file: the answers are the same, and the next process ends the work."""
    for num_acts in itertools.count():
        folder = tmp_path / str(num_acts)
        write_terms(folder, range(1, NUM_TERMS + 1))
        before = answers(folder)
        with dying_after(monkeypatch, num_acts):
            try:
                prune(folder, NUM_TERMS, KEPT)
                is_through = True
            except Died:
                is_through = False
        assert answers(folder) == before, f"after {num_acts} changes"
        later = NUM_TERMS + EVERY_TERMS
        prune(folder, later, KEPT)
        assert answers(folder) == before, f"after {num_acts} changes, and the next process"
        assert min(terms_left(folder)) == later - KEPT + 1
        if is_through:
            assert num_acts == 2 + 2 * (NUM_TERMS - KEPT), "a draft, its renaming, and every file"
            return


@pytest.mark.parametrize("content", ["", "{", "[]", '{"through": 1, "other": 2}'])
def test_a_damaged_summary_costs_what_was_only_there(tmp_path: Path, content: str) -> None:
    """The files that are left are counted, and pruning goes on."""
    write_terms(tmp_path, range(1, NUM_TERMS + 1))
    prune(tmp_path, NUM_TERMS, KEPT)
    (tmp_path / FOLDER / SUMMARY).write_text(content)
    found = faults_before(tmp_path, NUM_TERMS + 1)
    assert found.num == sum(term % 3 == 0 for term in range(NUM_TERMS - KEPT + 1, NUM_TERMS + 1))
    prune(tmp_path, NUM_TERMS, KEPT)
    assert summary_of(tmp_path).pruned == NUM_TERMS - KEPT


def test_one_process_prunes_at_a_time(tmp_path: Path) -> None:
    """Whoever finds the folder locked leaves the work to its holder."""
    write_terms(tmp_path, range(1, NUM_TERMS + 1))
    with (tmp_path / FOLDER / LOCK).open("w") as lock:
        assert locked_by(lock.fileno(), 0.0)
        prune(tmp_path, NUM_TERMS, KEPT)
        assert terms_left(tmp_path) == set(range(1, NUM_TERMS + 1))
    prune(tmp_path, NUM_TERMS, KEPT)
    assert 1 not in terms_left(tmp_path)


def test_what_others_keep_in_the_folder_stays(tmp_path: Path) -> None:
    """Only histories of terms are deleted."""
    write_terms(tmp_path, range(1, NUM_TERMS + 1))
    (tmp_path / FOLDER / "chaos.jsonl").write_text("mine")
    prune(tmp_path, NUM_TERMS, KEPT)
    assert (tmp_path / FOLDER / "chaos.jsonl").read_text() == "mine"
