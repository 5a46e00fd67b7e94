"""The trainer from the outside: every kind of bad input is refused with its exit code and what to do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from elastic_train.config.schema import Config
from elastic_train.config.sources import load_config
from elastic_train.errors import ConfigError
from elastic_train.job.plan import make_plan
from elastic_train.training.run import run
from rendezvous.etcd.server import free_ports
from tests.conftest import ROOT, run_ranks, write_rows
from tests.elastic_train.training.jobs import CLASSIFIER, PARAMS, config, succeed
from tests.memory_job import start

pytestmark = pytest.mark.slow


def damaged(rows: Path, folder: Path) -> Path:
    """Copy the training set with one file truncated."""
    write_rows(folder / "train", 331, seed=1)
    write_rows(folder / "validation", 101, seed=2)
    path = folder / "train" / "part-1.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    return folder


def test_a_truncated_file_is_refused_by_name(tmp_path: Path, rows: Path) -> None:
    """A truncated Parquet file ends the run with 65 and the file's name."""
    done = start([config(tmp_path, damaged(rows, tmp_path / "data"), CLASSIFIER)])
    assert done.code == 65
    assert "part-1.parquet" in done.output
    assert "is truncated" in done.output


def test_data_that_changed_since_the_commit_is_refused(tmp_path: Path, rows: Path) -> None:
    """A run does not resume on another dataset; its commits stay."""
    path = config(tmp_path, rows, CLASSIFIER, epochs=1)
    succeed(start([path]))
    commits = sorted((tmp_path / "run" / "commits").iterdir())
    write_rows(tmp_path / "other" / "train", 330, seed=9)
    done = start([path, "--data.train", str(tmp_path / "other" / "train"), "--epochs", "2"])
    assert done.code == 65
    assert "the manifest changed since commits/00000001-000000000014.json" in done.output
    assert sorted((tmp_path / "run" / "commits").iterdir()) == commits


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--data.train", "/nowhere"], 2, ["/nowhere: no manifest.json", "data import"]),
        (["--task.params", "{vocabulary: 64, numeric: [sise]}"], 65, ["no column 'sise'", "input_ids"]),
        (["--task.params", "{vocabulary: 64, label: kind}"], 65, ["label column 'kind' is string"]),
        (["--task.params", "{vocabulry: 64}"], 2, ["has no 'vocabulry'", "did you mean 'vocabulary'"]),
        (["--task.path", "tests.tasks:Missing"], 2, ["cannot be imported", "tests.tasks:Missing"]),
        (["--batch.global_bach", "8"], 2, ["unknown key 'batch.global_bach'", "batch.global_batch"]),
        (["--batch.global-batch", "10", "--epochs", "x"], 2, ["not a multiple", "'epochs'"]),
        (["--checkpoint.url", "nope://x"], 2, ["nope"]),
    ],
)
def test_bad_input_is_refused_before_training(
    tmp_path: Path, rows: Path, arguments: list[str], code: int, expected: list[str]
) -> None:
    """Each mistake has its exit code and a message that says what, where, and what to do; nothing is written."""
    done = start([config(tmp_path, rows, CLASSIFIER), *arguments])
    assert done.code == code, done.output
    for text in expected:
        assert text in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "run" / "history").exists()


def test_more_ranks_than_lanes_are_refused(tmp_path: Path, rows: Path) -> None:
    """Five ranks on four lanes end with an error that says what to do."""
    done = start([config(tmp_path, rows, CLASSIFIER)], num_ranks=5)
    assert done.code != 0
    assert "5 ranks, but only 4 lanes" in done.output
    assert not (tmp_path / "run" / "history").exists()


def test_batch_norm_across_ranks_is_refused(tmp_path: Path, rows: Path) -> None:
    """SyncBatchNorm would make the result depend on the world: refused before training, with the reason."""
    task = {"path": "tests.tasks:WithSyncBatchNorm", "params": PARAMS}
    done = start([config(tmp_path, rows, {**CLASSIFIER, "task": task})])
    assert done.code == 2
    assert "SyncBatchNorm (norm), whose statistics depend on the number of ranks: use BatchNorm" in done.output


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("OwnGenerator", "when it is computed again from the same weights and seeds: a generator of the task's"),
        ("CountingLosses", "attribute 'num_losses' of the task changes as a loss is computed, and no commit holds it"),
        ("HiddenMetric", "metric 'hidden': its value follows from more than its states"),
    ],
)
def test_what_no_other_world_could_have_again_is_refused_before_the_first_step(
    tmp_path: Path, few_rows: Path, task: str, expected: str
) -> None:
    """One process without a launcher does not warm up. A counter may be for a log: it only gives a warning."""
    tree = {**CLASSIFIER, "task": {"path": f"tests.tasks:{task}", "params": PARAMS}}
    done = start([config(tmp_path, few_rows, tree, max_steps=2)])
    assert expected in done.output
    assert done.code == (0 if task == "CountingLosses" else 2), done.output
    assert bool(list((tmp_path / "run").glob("commits/*"))) == (task == "CountingLosses")


def test_a_rank_with_another_model_is_turned_away_with_the_first_tensor_that_differs(
    tmp_path: Path, rows: Path
) -> None:
    """The check precedes any exchange whose size depends on the model, which would abort the processes."""
    tree = {**CLASSIFIER, "task": {"path": "tests.tasks:WiderByRank", "params": PARAMS}}
    done = start([config(tmp_path, rows, tree)], num_ranks=2)
    assert sorted(done.codes) == [1, 2], done.output
    assert (
        "error: the first of the model's tensors that differs is 'positions float32 [16, 32]' here and "
        "'positions float32 [16, 16]' on rank 0: all nodes must have the same"
    ) in done.output
    assert not list((tmp_path / "run").glob("commits/*"))


def test_the_example_of_a_language_model_needs_its_number_of_tokens(fewer_rows: Path) -> None:
    """It uses the model that it names; a configuration for other data has to give the number of token ids."""
    given = load_config(
        ROOT / "configs" / "language.yaml", {"data.train": fewer_rows / "train", "data.validation": None}
    )
    with pytest.raises(ConfigError, match=r"task.params.model.vocabulary: .* say how many token ids it has"):
        make_plan(given)
    whole = {**given.model_dump(), "task": {"path": given.task.path, "params": {**given.task.params, "max_tokens": 64}}}
    whole["task"]["params"]["model"]["vocabulary"] = 64
    assert make_plan(Config.model_validate(whole)).total_steps == 100


def train_with_own_helper(rank: int, size: int, folder: str, port: int) -> None:
    """Run one rank of a job whose task has a helper module that belongs to this rank's node."""
    sys.path.insert(0, f"{folder}/{rank}")
    place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(size)}
    os.environ.update({**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    sys.stderr = Path(f"{folder}/{rank}.log").open("w", buffering=1)  # noqa: SIM115 - the process ends by `os._exit`
    run(Path(f"{folder}/config.yaml"), [])


@pytest.mark.parametrize("halves", ["0.5", "0.25"])
def test_a_rank_whose_task_has_another_helper_is_turned_away(tmp_path: Path, rows: Path, halves: str) -> None:
    """The models have equal shapes; only a module that the task imports computes a different loss."""
    for rank, factor in enumerate(("0.5", halves)):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "own_task.py").write_text(TASK_WITH_HELPER)
        (tmp_path / str(rank) / "own_helper.py").write_text(f"FACTOR = {factor}\n")
    config(tmp_path, rows, {**CLASSIFIER, "task": {"path": "own_task:Scaled", "params": PARAMS}}, max_steps=3)
    codes = (0, 0) if halves == "0.5" else (1, 2)
    run_ranks(train_with_own_helper, 2, str(tmp_path), free_ports(1)[0], codes=codes)
    refused = "error: the first of the task's modules that differs is 'own_helper " in (tmp_path / "1.log").read_text()
    assert refused == (halves != "0.5")


TASK_WITH_HELPER = """
from dataclasses import replace

from elastic_train.tasks.text_classifier import TextClassifier


class Scaled(TextClassifier):
    def loss(self, model, batch):
        from own_helper import FACTOR

        loss = super().loss(model, batch)
        return replace(loss, total=loss.total * FACTOR)
"""
