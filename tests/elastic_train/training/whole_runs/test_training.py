"""The trainer from the outside: one hash at any world size, for several kinds of models."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import elastic_train as et
from tests.conftest import ROOT, run_source
from tests.conftest import start as start_processes
from tests.elastic_train.training.jobs import CLASSIFIER, PARAMS, WITNESS, config, history, result, succeed
from tests.memory_job import start

pytestmark = pytest.mark.slow


def test_another_world_gives_the_same_bits(tmp_path: Path, rows: Path, alone: Path) -> None:
    """Weights, losses, metrics and coverage of ranks with unequal numbers of lanes equal one process's, bit for bit."""
    succeed(start([config(tmp_path, rows, CLASSIFIER)], num_ranks=3))
    expected, actual = result(alone), result(tmp_path)
    for key in ("weights_sha256", "metrics", "coverage", "step"):
        assert actual[key] == expected[key], key
    assert actual["world"] == 3
    losses = {step["step"]: step["loss"] for step in history(alone, "step")}
    assert {step["step"]: step["loss"] for step in history(tmp_path, "step")} == losses


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_lower_precisions_keep_the_bits(tmp_path: Path, rows: Path, precision: str) -> None:
    """Autocast, the gradient scaler's decisions and the scales of float8 do not depend on the world."""
    digests = set()
    for num_ranks in (None, 2):
        folder = tmp_path / str(num_ranks)
        succeed(start([config(folder, rows, CLASSIFIER, epochs=1), "--precision", precision], num_ranks=num_ranks))
        digests.add(result(folder)["weights_sha256"])
    assert len(digests) == 1


@pytest.mark.parametrize("shards", ["none", "parameters"])
def test_every_sample_counts_once_an_epoch(tmp_path: Path, rows: Path, shards: str) -> None:
    """A task gets the whole model in the end, with the number of times that each sample counted."""
    succeed(start([config(tmp_path, rows, WITNESS), "--parallel.shards", shards], num_ranks=3))
    counts = np.load(tmp_path / "run" / "witness.npy")
    assert Counter(counts.tolist()) == {3: 331}


@pytest.mark.parametrize(("how", "num_ranks"), [("repeat", None), ("drop", 2)])
def test_an_epoch_whose_samples_were_not_applied_once_each_is_the_last(
    tmp_path: Path, rows: Path, how: str, num_ranks: int | None
) -> None:
    """The error has the expected and actual sums, the exit code prevents restarts, no commit has the epoch's end."""
    task = {"path": "tests.tasks:Miscounts", "params": {**PARAMS, "how": how}}
    path = config(tmp_path, rows, {**CLASSIFIER, "task": task}, checkpoint={"every": "1 steps"})
    done = start_processes([path], num_ranks=num_ranks)
    assert done.code == 65, done.output
    num_rows = et.load_manifest(str(rows / "train")).num_rows
    assert "the samples of epoch 0 were not applied once each" in done.output
    assert f"{num_rows:,} (sums " in done.output.partition("are expected")[0]
    head = et.discover(et.open_store(str(tmp_path / "run"))).head
    assert head is None or head.cursor.epoch == 0
    assert not (tmp_path / "run" / "result.json").exists()


BESIDE = """
import sys
sys.path.insert(0, ".")
from elastic_train.cli.main import main_train
main_train()
"""


def test_a_custom_task_and_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example trains a user's task and columns from outside the package, on one rank and on two.

    The task does not say how to cut its model, yet two ranks shard its parameters.
    """
    example = ROOT / "examples" / "own_task"
    made = run_source(
        f"import runpy; runpy.run_path({str(example / 'make_data.py')!r}, run_name='__main__')",
        str(tmp_path / "prices"),
    )
    assert made.returncode == 0, made.stderr
    line = [str(example / "config.yaml"), "--data.train", str(tmp_path / "prices"), "--run.dir"]
    alone = run_source(BESIDE, *line, str(tmp_path / "one" / "run"), cwd=example)
    assert alone.returncode == 0, alone.stderr
    monkeypatch.syspath_prepend(example)
    monkeypatch.delitem(sys.modules, "task", raising=False)
    succeed(start([*line, str(tmp_path / "two" / "run"), "--parallel.shards", "parameters"], num_ranks=2))
    del sys.modules["task"]
    assert result(tmp_path / "one")["weights_sha256"] == result(tmp_path / "two")["weights_sha256"]


def with_batch_norm(folder: Path, rows: Path, **changes: object) -> str:
    """Write the configuration of a classifier whose forward pass changes buffers."""
    task = {"path": "tests.tasks:WithBatchNorm", "params": {**PARAMS, **changes}}
    return config(folder, rows, {**CLASSIFIER, "task": task}, epochs=1)


def test_buffers_that_forward_passes_change_are_state(tmp_path: Path, rows: Path) -> None:
    """BatchNorm's statistics equal one process's on ranks with unequal numbers of lanes, and come from a commit."""
    succeed(start([with_batch_norm(tmp_path / "alone", rows)]))
    expected = result(tmp_path / "alone")
    done = succeed(start([with_batch_norm(tmp_path / "three", rows)], num_ranks=3))
    assert "torch.backends.cudnn.benchmark was changed from False to True" in done.output
    assert [result(tmp_path / "three")[key] for key in ("weights_sha256", "metrics")] == [
        expected[key] for key in ("weights_sha256", "metrics")
    ]
    path = with_batch_norm(tmp_path / "failed", rows, marker=str(tmp_path / "marker"), after=44)
    assert start([path]).code != 0
    second = succeed(start([path], num_ranks=3))
    assert "Resuming from step" in second.output
    assert result(tmp_path / "failed")["weights_sha256"] == expected["weights_sha256"]


def test_ranks_that_begin_with_other_weights_take_those_of_rank_0(tmp_path: Path, rows: Path) -> None:
    """A task that initialises with another library's generator still trains one model, as under DDP."""
    tree = {**CLASSIFIER, "task": {"path": "tests.tasks:OwnWeights", "params": PARAMS}}
    succeed(start([config(tmp_path / "alone", rows, tree, max_steps=4)]))
    done = succeed(start([config(tmp_path / "two", rows, tree, max_steps=4)], num_ranks=2))
    assert "ranks [1] began with other weights than rank 0 and take its weights" in done.output
    assert result(tmp_path / "two")["weights_sha256"] == result(tmp_path / "alone")["weights_sha256"]
