"""Steps with a NaN loss: all ranks skip the update, the samples are named, and too many in a row end training."""

from __future__ import annotations

from pathlib import Path

import pytest

import elastic_train as et
from elastic_train.checkpoint.commits.reader import commit_keys, damage_of, read_record
from elastic_train.checkpoint.commits.retention_policies import pinned
from elastic_train.job.plan import make_plan
from tests.elastic_train.training.jobs import CLASSIFIER, PARAMS, config, history, result, succeed
from tests.memory_job import start

pytestmark = pytest.mark.slow


def poisoned(folder: Path, rows: Path, ids: list[int], how: str, **changes: object) -> str:
    task = {"path": "tests.tasks:Poisoned", "params": {**PARAMS, "ids": ids, "how": how}}
    return config(folder, rows, {**CLASSIFIER, "task": task}, **changes)


def samples_of(path: str, *steps: int) -> list[int]:
    """Return one sample from each of these steps of the first epoch, counted from 1."""
    plan = make_plan(et.load_config(path))
    epoch = plan.order.epoch(0)
    return [int(epoch.ids(0, (step - 1) * plan.micro_batch, step * plan.micro_batch)[0]) for step in steps]


def test_the_update_of_a_step_that_is_not_finite_is_left_out_and_its_samples_are_named(
    tmp_path: Path, rows: Path
) -> None:
    """The same for any number of ranks, in commits and in the result; weights stay finite, and every sample counts."""
    ended = {}
    for name, num_ranks in (("one", None), ("two", 2)):
        done = succeed(start([poisoned(tmp_path / name, rows, [5, 40], "nan")], num_ranks=num_ranks))
        assert "its update is left out" in done.output
        ended[name] = result(tmp_path / name)
        reported = history(tmp_path / name, "nonfinite")
        spans = [span for line in reported for ranges in line["samples"].values() for span in ranges]  # type: ignore[attr-defined]
        ids = {id_ for lo, hi in spans for id_ in range(lo, hi)}
        assert {5, 40} <= ids and len(ids) <= 4 * 6  # two lanes in each of two epochs
        assert {line["loss"] for line in reported} == {"nan"}
    assert ended["one"]["weights_sha256"] == ended["two"]["weights_sha256"]
    assert ended["one"]["skipped_steps"] == ended["two"]["skipped_steps"] != []
    head = et.discover(et.open_store(str(tmp_path / "two" / "run"))).head
    assert head is not None and [list(pair) for pair in head.skipped_steps or ()] == ended["two"]["skipped_steps"]


def test_steps_in_a_row_that_are_not_finite_end_training_and_the_last_good_commit_is_kept(
    tmp_path: Path, rows: Path
) -> None:
    """The exit code prevents a restart; `keep` trains on, as other trainers do."""
    checkpoint = {"every": "1 steps", "keep_last": 2}
    ids = samples_of(poisoned(tmp_path, rows, [], "nan"), *range(4, 14))
    path = poisoned(tmp_path, rows, ids, "nan", checkpoint=checkpoint)
    done = start([path], num_ranks=2)
    assert done.code == 93, done.output
    assert "loss or gradient of 10 steps in a row, up to step 13, was not finite" in done.output
    store = et.open_store(str(tmp_path / "run"))
    [key] = pinned(store)
    good = read_record(store, key)
    assert good.step in (2, 3), "that of step 3 may still have been in flight"
    assert damage_of(store, key) is None
    later = [key for key in commit_keys(store) if read_record(store, key).step > good.step]
    assert len(later) <= 2, "all others were deleted"
    optimizer = {**CLASSIFIER["optimizer"], "on_nonfinite": "keep"}  # type: ignore[dict-item]
    path = poisoned(tmp_path / "keep", rows, [5], "nan", optimizer=optimizer)
    assert "its update is used all the same" in succeed(start([path])).output
    assert result(tmp_path / "keep")["skipped_steps"] == []
