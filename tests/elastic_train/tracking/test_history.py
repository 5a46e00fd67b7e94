"""The history: its lines, the terms that get no further, and the files that are kept."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_train.checkpoint.saving.cadence import Faults, faults_before
from elastic_train.core.accounting import CoverageSums
from elastic_train.system import files
from elastic_train.system.files import locked_by
from elastic_train.tracking import background_files, history
from elastic_train.tracking import history as history_module
from elastic_train.tracking.background_files import BackgroundFiles
from elastic_train.tracking.history import History, UnformedWorlds
from elastic_train.tracking.history_files import (
    EVERY_TERMS,
    FOLDER,
    LOCK,
    SUMMARY,
    LastApplied,
    Stagnation,
    histories,
    last_applied,
    last_step_lines,
    num_ended,
    prune,
    restore_line,
    stagnation,
    summary_of,
    term_of,
)
from tests.elastic_train.tracking.unqueued import Unqueued, add_commit, add_restore


def read_history(run_dir: Path) -> list[dict[str, object]]:
    """Read the lines of all processes, of which only whole ones count."""
    lines = [line for path in sorted((run_dir / "history").iterdir()) for line in path.read_bytes().splitlines()]
    return [json.loads(line) for line in lines if line.endswith(b"}")]


def step(history: History, number: int, world: int = 2) -> None:
    history.step(step=number, epoch=0, lo=number, hi=number + 1, lanes=range(4), num_samples=4, world=world, loss=0.5)


def begin(history: History) -> None:
    history.form(world=2, cause="lost", joined_at=None, sealed_at=1.0, started_at=2.0)
    add_restore(history, 4, 1)


def write_all(run_dir: Path) -> None:
    history = History(Unqueued(), run_dir, term=3, rank=1)
    begin(history)
    step(history, 5)
    add_commit(history, 5)
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
    """A torn or foreign line is not read, and hides no other line."""
    write_all(tmp_path)
    (path,) = (tmp_path / "history").iterdir()
    path.write_bytes(torn + b"\n" + path.read_bytes() + torn)
    found = last_applied(tmp_path, before_term=4)
    assert found is not None
    assert found.step == 5


def test_the_last_applied_step_is_the_newest_earlier_terms_furthest(tmp_path: Path) -> None:
    """Later and stepless terms do not count; of the ranks the furthest one does."""
    for term, rank, number in [(1, 0, 90), (2, 0, 41), (2, 1, 42), (5, 0, 7)]:
        history = History(Unqueued(), tmp_path, term, rank)
        step(history, number, world=term)
        history.close()
    History(Unqueued(), tmp_path, 3, 0).close()
    (tmp_path / "history" / "notes-of-mine-x.jsonl").write_text("mine\n")
    found = last_applied(tmp_path, before_term=5)
    assert isinstance(found, LastApplied)
    assert (found.term, found.step, found.world) == (2, 42, 2)
    assert last_applied(tmp_path, before_term=1) is None
    assert last_applied(tmp_path / "none", before_term=1) is None


@pytest.mark.heavy
@pytest.mark.parametrize("num_after", [0, 1, 3000])
def test_a_step_is_found_however_many_lines_follow_it(tmp_path: Path, num_after: int) -> None:
    """The ends of the files are read until a step is in them."""
    history = History(Unqueued(), tmp_path, 1, 0)
    for number in range(1, 200):
        step(history, number)
    for _ in range(num_after):
        add_commit(history, 199)
    found = last_applied(tmp_path, before_term=2)
    assert found is not None
    assert found.step == 199


def test_a_term_that_began_right_after_knows_the_last_steps(tmp_path: Path) -> None:
    """A process's next world sees what the thread had not written when the last one ended."""
    files = BackgroundFiles()
    history = History(files, tmp_path, 1, 0)
    for number in range(1, 500):
        step(history, number)
    found = History(files, tmp_path, 2, 0).last_applied()
    assert found is not None and found.step == 499


def test_ids_are_in_the_file_before_the_step_goes_on(tmp_path: Path) -> None:
    """The ids of a step are in the file even if the rank dies in that step's reduction."""
    history = History(BackgroundFiles(), tmp_path, 1, 0)
    for number in range(1, 100):
        history.read(step=number, epoch=0, ids=((0, 3),), world=2)
        assert read_history(tmp_path)[-1]["step"] == number


def test_a_long_history_keeps_its_beginning_and_its_newer_half(tmp_path: Path) -> None:
    """It stays below its limit in parts, each of which says how the world formed and what was restored."""
    most_bytes = 1 << 14
    history = History(Unqueued(), tmp_path, 3, 0, most_bytes)
    begin(history)
    for number in range(5, 1000):
        step(history, number)
        assert sum(path.stat().st_size for path in (tmp_path / "history").iterdir()) <= most_bytes
    ((older, newer),) = histories(tmp_path, rank=0)
    assert older.name < newer.name
    for part in (older, newer):
        first = restore_line(part)
        assert first is not None and (first["step"], first["again"]) == (4, True)
    (steps,) = [[line["step"] for line in read_history(tmp_path) if line["op"] == "step"]]
    assert steps == list(range(int(str(steps[0])), 1000)), "what is left has no gap"
    assert last_step_lines(newer)[-1]["step"] == 999
    found = last_applied(tmp_path, before_term=4)
    assert found is not None and found.step == 999


def test_a_history_that_could_not_be_opened_at_first_says_how_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder comes back: what was lost is lost, but for the lines without which the rest says little."""
    monkeypatch.setattr(background_files, "OPEN_AGAIN_S", 0.0)
    (tmp_path / "run").write_text("not a folder")
    history = History(Unqueued(), tmp_path / "run", 3, 0)
    begin(history)
    step(history, 5)
    (tmp_path / "run").unlink()
    step(history, 6)
    lines = read_history(tmp_path / "run")
    assert [(line["op"], line.get("again")) for line in lines] == [("form", True), ("restore", True), ("step", None)]


def test_terms_that_ended_while_they_validated_are_counted(tmp_path: Path) -> None:
    """A line that was written after a validation began shows that it was over."""
    for term, is_over in enumerate((False, False, True, False), 1):
        history = History(Unqueued(), tmp_path, term, 0)
        for number in (1, 2, 3):
            step(history, number)
        history.validate(step=3)
        if is_over:
            history.rollback(from_step=3, to_step=3)
        history.close()
    assert stagnation(tmp_path, 5, most=20) == Stagnation(3, 3, 2)


def test_processes_that_outlive_their_worlds_have_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks in ten terms, nobody ended; then one in every term, with the pid of the one before, as in a pod."""

    def world(term: int, *born: int) -> None:
        for rank, ticks in enumerate(born):
            monkeypatch.setattr(history_module, "process_identity", lambda ticks=ticks: {"host": "a", "born": ticks})
            history = History(Unqueued(), tmp_path, term, rank)
            history.form(world=2, cause="lost", joined_at=None, sealed_at=1.0, started_at=2.0)
            history.close()

    for term in range(1, 11):
        world(term, 1, 2)
    assert num_ended(tmp_path, 11, 10) == 0
    for term in range(11, 21):
        world(term, 1, term)
    assert num_ended(tmp_path, 21, 10) == 9
    assert num_ended(tmp_path, 21, 20) == 10


def test_terms_that_get_no_further_are_counted(tmp_path: Path) -> None:
    """Since the furthest step of any, or since the job gave up; other ranks' files do not count."""

    def world(term: int, *steps: int, gives_up: bool = False, ends: bool = False, rank: int = 0) -> None:
        history = History(Unqueued(), tmp_path, term, rank)
        history.form(world=2, cause="lost", joined_at=None, sealed_at=1.0, started_at=2.0)
        for number in steps:
            step(history, number)
        if gives_up:
            history.no_progress(step=4)
        if ends:
            history.end(status="done", step=4, weights_sha256="w", coverage=CoverageSums())
        history.close()

    assert stagnation(tmp_path, 1, most=20) == Stagnation(0, 0)
    world(1)
    world(2, 1, 2, 3)
    assert stagnation(tmp_path, 3, most=20) == Stagnation(0, 3)
    world(3)
    world(4, 1, 2, 3)  # from the last commit to the same step
    world(4, 4, rank=1)
    assert stagnation(tmp_path, 5, most=20) == Stagnation(2, 3)
    assert stagnation(tmp_path, 5, most=2) == Stagnation(2, 3)
    assert stagnation(tmp_path, 3, most=20) == Stagnation(0, 3)
    world(5, 1, 2, 3, 4)
    assert stagnation(tmp_path, 6, most=20) == Stagnation(0, 4)
    for term in (6, 7):  # started again when it was done
        world(term, ends=True)
    assert stagnation(tmp_path, 8, most=20) == Stagnation(0, 4)
    world(8, gives_up=True)
    world(9)
    assert stagnation(tmp_path, 10, most=20) == Stagnation(1, 0)


def test_unformed_worlds_of_processes_with_one_pid_are_in_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pid is used again, and containers of one host name count theirs alike."""
    files = Unqueued()
    for born, boot in ((7, "a"), (8, "a"), (7, "b")):
        who = {"host": "node", "boot": boot, "born": born}
        monkeypatch.setattr(history_module, "process_identity", lambda who=who: who)
        UnformedWorlds(files, tmp_path).note(3, 0, 2, "no answer")
    lines = read_history(tmp_path)
    assert len(list((tmp_path / "history").iterdir())) == 3
    assert sorted((line["born"], line["boot"]) for line in lines) == [(7, "a"), (7, "b"), (8, "a")]


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
        patch.setattr(files.Path, "write_text", counted(Path.write_text))
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
