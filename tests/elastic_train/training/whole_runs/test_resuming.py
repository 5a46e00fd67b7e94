"""The trainer from the outside: crashes, signals, full disks, flipped bits, and runs that resume."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic_train.cli.runs.status import status_of
from tests import memory_job, memory_live
from tests.conftest import Finished, run_source, start
from tests.elastic_train.training.jobs import CLASSIFIER, PARAMS, config, failing, history, result, succeed

pytestmark = pytest.mark.slow


def test_a_failed_run_resumes_at_another_world_size(tmp_path: Path, rows: Path, alone: Path) -> None:
    """A crashed run of two ranks is resumed by three from its newest commit, and ends with the same bits."""
    path = config(tmp_path, rows, failing(tmp_path, after=34))
    first = start([path], num_ranks=2)
    assert first.code != 0
    assert "planted failure" in first.output
    stopped = status_of(str(tmp_path / "run")).stopped
    assert stopped is not None, "the first to fail has noted it"
    assert (stopped.step, stopped.ended_with, stopped.do) == (11, 1, "fix")
    assert re.search(r"RuntimeError: planted failure \(.*tests/tasks.py, line", stopped.sentence)
    second = succeed(start([path], num_ranks=3))
    assert "Resuming from step 7 (commits/00000001-000000000007.json" in second.output
    assert "steps lost: 4" in second.output
    for key in ("weights_sha256", "metrics", "coverage"):
        assert result(tmp_path)[key] == result(alone)[key], key
    assert result(tmp_path)["term"] == 2


def test_sigterm_commits_and_exits_with_75(tmp_path: Path, rows: Path, alone: Path) -> None:
    """The trainer commits at the step's boundary, exits with 75, and loses nothing."""
    path = config(tmp_path, rows, failing(tmp_path, after=42, how="SIGTERM"))
    assert start([path]).code == 75
    assert result(tmp_path)["status"] == "preempted"
    assert (tmp_path / "run" / "commits" / "00000001-000000000011.json").exists()
    again = succeed(start([path]))
    assert "steps lost: 0" in again.output
    assert result(tmp_path)["weights_sha256"] == result(alone)["weights_sha256"]


def test_a_finished_run_is_not_trained_again(tmp_path: Path, rows: Path) -> None:
    """Starting a finished run again exits at once with the same result."""
    path = config(tmp_path, rows, CLASSIFIER, epochs=1)
    succeed(start([path]))
    first = result(tmp_path)["weights_sha256"]
    again = succeed(start([path])).output
    assert "All 14 steps are applied already" in again and "Resuming from step 14 (" in again
    assert not any(text in again for text in ("claimed term", "has changed", "have changed"))
    assert result(tmp_path)["weights_sha256"] == first
    assert len(history(tmp_path, "step")) == 14


LIMITED = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_FSIZE, (24 << 10, 24 << 10))
runpy.run_module("elastic_train", run_name="__main__", alter_sys=True)
"""


def start_on_a_full_disk(*arguments: str) -> Finished:
    """Start a run whose files cannot grow beyond 24 KiB."""
    done = run_source(LIMITED, *arguments)
    return Finished(done.returncode, done.stdout + done.stderr)


def test_a_full_disk_stops_no_training(tmp_path: Path, rows: Path) -> None:
    """Saves that fail for lack of space are counted and training continues; without its last commit no job is done."""
    done = start_on_a_full_disk(config(tmp_path, rows, CLASSIFIER, epochs=1))
    assert done.code == 1, done.output
    assert "FAILED (1 so far), training continues" in done.output
    said = r"error: step 14 could not be committed in 3 tries: .*cannot write: File too large.* start again to resume"
    assert re.search(said, done.output)
    assert not (tmp_path / "run" / "result.json").exists()
    assert not list((tmp_path / "run" / "commits").glob("*"))
    assert not list((tmp_path / "run" / "data").rglob("*.distcp"))


def test_a_disk_that_stays_full_ends_training(tmp_path: Path, rows: Path) -> None:
    """After too many failed saves in a row the run ends early and says what to do."""
    options = ["--checkpoint.every", "1 step, 15 min"]
    options += ["--give-up-after", "20 worlds, 0.001 s"]
    done = start_on_a_full_disk(config(tmp_path, rows, CLASSIFIER, epochs=1), *options)
    assert done.code == 1, done.output
    assert "FAILED (2 so far), training continues" in done.output
    assert "error: at least 10 saves in a row have failed, for 0 s or more, the last before step" in done.output
    assert len(history(tmp_path, "step")) < 14


@pytest.mark.parametrize(
    ("num_ranks", "rank", "said"),
    [
        (2, 1, "ranks 0 and 1 hold different weights, and nothing says which of them is right"),
        (3, 0, "ranks [0] hold other weights than the 2 others"),
    ],
)
def test_a_flipped_bit_is_found_before_the_next_commit(
    tmp_path: Path, rows: Path, alone: Path, num_ranks: int, rank: int, said: str
) -> None:
    """Tensor and rank are named, no model is committed or handed over, and the job resumes from before the flip."""
    params = {**PARAMS, "marker": str(tmp_path / "flipped"), "after": 30, "rank": rank}
    path = config(tmp_path, rows, {**CLASSIFIER, "task": {"path": "tests.tasks:Flips", "params": params}})
    done = (
        memory_live.start([path], num_ranks=3, losses=[]) if num_ranks == 3 else memory_job.start([path], num_ranks=2)
    )
    assert set(done.codes) == {1}
    assert done.output.count(said) == num_ranks, done.output
    assert f"{said}, first in 'head.weight'" in done.output
    assert (tmp_path / "flipped").exists()
    succeed(memory_job.start([path], num_ranks=num_ranks))
    assert result(tmp_path)["weights_sha256"] == result(alone)["weights_sha256"]
