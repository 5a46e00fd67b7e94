"""The trainer from the outside: one hash at any world size, resumption, signals, and every kind of bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml

from elastic_train.checkpoint.format.torch_frame import bytes_of
from elastic_train.checkpoint.format.weights_digest import join_digests, tensor_digest
from elastic_train.data.corpora.synthetic import synthesise
from elastic_train.training.run import run
from rendezvous.etcd.server import free_ports
from tests.conftest import ROOT, Finished, run_ranks, start, start_cold, write_rows

pytestmark = pytest.mark.slow

PARAMS = {
    "max_tokens": 16,
    "dim": 16,
    "depth": 1,
    "heads": 2,
    "dropout": 0.2,
    "vocabulary": 64,
    "numeric": ["size"],
    "categorical": ["kind"],
}
CLASSIFIER: dict[str, object] = {
    "task": {"path": "elastic_train.tasks.text_classifier:TextClassifier", "params": PARAMS},
    "batch": {"global_batch": 24, "micro_batch": 6},
    "optimizer": {"lr": 0.01, "warmup_steps": 3},
    "epochs": 2,
    "validation": {"every_steps": 10},
    "checkpoint": {"every_steps": 7, "keep_last": 3},
}
WITNESS: dict[str, object] = {
    "task": {"path": "elastic_train.tasks.witness:Witness"},
    "batch": {"global_batch": 30, "micro_batch": 6},
    "optimizer": {
        "name": "sgd",
        "lr": 1.0,
        "weight_decay": 0,
        "clip_norm": None,
        "warmup_steps": 0,
        "schedule": "constant",
    },
    "epochs": 3,
    "checkpoint": {"every_steps": 5},
}


def config(folder: Path, rows: Path, tree: dict[str, object], **changes: object) -> str:
    """Write a configuration whose run is stored below `folder`."""
    data = {"train": str(rows / "train"), "validation": str(rows / "validation"), "too_long": "truncate"}
    whole = {"run": {"dir": str(folder / "run"), "seed": 5}, "data": data, **tree, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(whole))
    return str(path)


def failing(folder: Path, after: int, how: str = "raise") -> dict[str, object]:
    """Return the classifier's configuration with a task that fails once."""
    params = {**PARAMS, "marker": str(folder / "failed"), "after": after, "how": how}
    return {**CLASSIFIER, "task": {"path": "tests.tasks:FailsOnce", "params": params}}


def result(folder: Path) -> dict[str, object]:
    return json.loads((folder / "run" / "result.json").read_text())


def history(folder: Path, op: str) -> list[dict[str, object]]:
    lines = [line for path in (folder / "run" / "history").glob("*") for line in path.read_text().splitlines()]
    return [line for line in map(json.loads, lines) if line["op"] == op]


def succeed(done: Finished) -> Finished:
    assert done.code == 0, done.output
    return done


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Path:
    """A finished run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    succeed(start([config(folder, rows, CLASSIFIER)]))
    return folder


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_any_world_gives_the_same_bits(tmp_path: Path, rows: Path, alone: Path, num_ranks: int) -> None:
    """Weights, losses, metrics and coverage of W ranks are those of one process, to the last bit."""
    succeed(start([config(tmp_path, rows, CLASSIFIER)], num_ranks=num_ranks))
    expected, actual = result(alone), result(tmp_path)
    for key in ("weights_sha256", "metrics", "coverage", "step"):
        assert actual[key] == expected[key], key
    assert actual["world"] == num_ranks
    losses = {step["step"]: step["loss"] for step in history(alone, "step")}
    assert {step["step"]: step["loss"] for step in history(tmp_path, "step")} == losses


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precisions_keep_the_bits(tmp_path: Path, rows: Path, precision: str) -> None:
    """Autocast, and the gradient scaler's decisions, do not depend on the world either."""
    digests = set()
    for num_ranks in (None, 2):
        folder = tmp_path / str(num_ranks)
        succeed(start([config(folder, rows, CLASSIFIER, epochs=1), "--precision", precision], num_ranks=num_ranks))
        digests.add(result(folder)["weights_sha256"])
    assert len(digests) == 1


def test_fast_reduction_counts_every_sample_too(tmp_path: Path, rows: Path, alone: Path) -> None:
    """With `reduction: fast` only rounding may vary: steps and coverage are those of the canonical run."""
    succeed(start([config(tmp_path, rows, CLASSIFIER), "--reduction", "fast"], num_ranks=3))
    assert result(tmp_path)["coverage"] == result(alone)["coverage"]
    assert result(tmp_path)["metrics"]["loss"] == pytest.approx(result(alone)["metrics"]["loss"], rel=0.05)  # type: ignore[index]


def test_every_sample_counts_once_an_epoch(tmp_path: Path, rows: Path) -> None:
    """The witness has counted every sample exactly `epochs` times, on three ranks and five lanes."""
    succeed(start([config(tmp_path, rows, WITNESS)], num_ranks=3))
    counts = np.load(tmp_path / "run" / "witness.npy")
    assert Counter(counts.tolist()) == {3: 331}


def test_a_failed_run_resumes_at_another_world_size(tmp_path: Path, rows: Path, alone: Path) -> None:
    """A run of two ranks that crashed is resumed by three from its newest commit, and ends with the same bits."""
    path = config(tmp_path, rows, failing(tmp_path, after=34))
    first = start_cold([path], num_ranks=2)
    assert first.code != 0
    assert "planted failure" in first.output
    second = succeed(start([path], num_ranks=3))
    assert "resumed from commits/00000001-000000000007.json (step 7" in second.output
    assert "steps lost: 4" in second.output
    for key in ("weights_sha256", "metrics", "coverage"):
        assert result(tmp_path)[key] == result(alone)[key], key
    assert result(tmp_path)["term"] == 2


@pytest.mark.long
@pytest.mark.timeout(900)
def test_policy_data_gives_the_same_metrics_resumed_or_not(tmp_path: Path) -> None:
    """Eleven classes with a long tail; crashed or asked to leave, finished on other ranks: equal to the last digit."""
    for name, num_rows, seed in (("train", 720, 1), ("validation", 300, 2)):
        synthesise(str(tmp_path / name), num_rows, "policy", seed, rows_per_group=64)
    params: dict[str, object] = {"max_tokens": 32, "dim": 16, "depth": 1, "heads": 2}

    def end_of(name: str, path: str, failing: dict[str, object], *worlds: int | None) -> dict[str, object]:
        task = {"path": path, "params": {**params, **failing}}
        folder = tmp_path / name
        arguments = [config(folder, tmp_path, CLASSIFIER, task=task, epochs=1)]
        codes = [start(arguments, num_ranks=num_ranks, timeout_s=280).code for num_ranks in worlds]
        assert [code == 0 for code in codes] == [number == len(worlds) for number in range(1, len(worlds) + 1)]
        end = result(folder)
        assert end["term"] == len(worlds) and end["world"] == (worlds[-1] or 1)
        return end

    straight = end_of("straight", "elastic_train.tasks.text_classifier:TextClassifier", {}, None)
    for how, worlds in (("raise", (2, 3)), ("SIGTERM", (None, 2))):
        failing = {"marker": str(tmp_path / f"{how} failed"), "after": 40, "how": how}
        resumed = end_of(how, "tests.tasks:FailsOnce", failing, *worlds)
        for key in ("weights_sha256", "metrics", "coverage", "step"):
            assert resumed[key] == straight[key], key
    assert {"loss", "macro_f1"} <= straight["metrics"].keys()  # type: ignore[attr-defined]


def test_sigterm_commits_and_exits_with_75(tmp_path: Path, rows: Path, alone: Path) -> None:
    """Asked to leave, the trainer commits at the step's boundary, exits with 75, and loses nothing."""
    path = config(tmp_path, rows, failing(tmp_path, after=42, how="SIGTERM"))
    assert start([path]).code == 75
    assert result(tmp_path)["status"] == "preempted"
    assert (tmp_path / "run" / "commits" / "00000001-000000000011.json").exists()
    again = succeed(start([path]))
    assert "steps lost: 0" in again.output
    assert result(tmp_path)["weights_sha256"] == result(alone)["weights_sha256"]


def test_a_finished_run_is_not_trained_again(tmp_path: Path, rows: Path) -> None:
    """Starting a finished run again ends at once with the same result."""
    path = config(tmp_path, rows, CLASSIFIER, epochs=1)
    succeed(start([path]))
    first = result(tmp_path)["weights_sha256"]
    succeed(start([path]))
    assert result(tmp_path)["weights_sha256"] == first
    assert len(history(tmp_path, "step")) == 14


def test_stock_dcp_reads_a_commit_that_two_ranks_wrote(tmp_path: Path, rows: Path) -> None:
    """torch.distributed.checkpoint.load, without any of our code, gives the weights that record and result name."""
    task = {"path": CLASSIFIER["task"]["path"], "params": {**PARAMS, "vocabulary": 60_000}}  # type: ignore[index]
    succeed(start([config(tmp_path, rows, CLASSIFIER, epochs=1, task=task)], num_ranks=2))
    record = json.loads(max((tmp_path / "run" / "commits").iterdir()).read_text())
    assert sorted(record["files"]) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    folder = tmp_path / "run" / record["attempt"]
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    weights = {
        name.removeprefix("model."): torch.zeros(about.size, dtype=about.properties.dtype)
        for name, about in stored.items()
        if name.startswith("model.")
    }
    dcp.load({"model": weights}, checkpoint_id=folder)
    digests = {name: tensor_digest(tensor.dtype, tensor.shape, bytes_of(tensor)) for name, tensor in weights.items()}
    assert join_digests(digests) == record["weights_sha256"] == result(tmp_path)["weights_sha256"]


def start_on_a_full_disk(*arguments: str) -> Finished:
    """Start a run whose files cannot grow beyond 24 KiB."""
    limited = f"ulimit -f 24; exec {sys.executable} -m elastic_train {' '.join(arguments)}"
    done = subprocess.run(
        ["bash", "-c", limited],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    return Finished(done.returncode, done.stdout)


def test_a_full_disk_stops_no_training(tmp_path: Path, rows: Path) -> None:
    """Saves that fail for want of space are counted; training continues. Without its last commit a job is not done."""
    done = start_on_a_full_disk(config(tmp_path, rows, CLASSIFIER, epochs=1))
    assert done.code == 1, done.output
    assert "FAILED (1 so far), training continues" in done.output
    assert "error: step 14 could not be committed in 3 tries: make room in" in done.output
    assert not (tmp_path / "run" / "result.json").exists()
    assert not list((tmp_path / "run" / "commits").glob("*"))
    assert not list((tmp_path / "run" / "data").rglob("*.distcp"))


def test_a_disk_that_stays_full_ends_training(tmp_path: Path, rows: Path) -> None:
    """After so many failed saves in a row the run ends, in the middle, and says what to do."""
    options = ["--checkpoint.every-steps", "1", "--checkpoint.when-busy", "wait", "--checkpoint.give-up-after", "2"]
    done = start_on_a_full_disk(config(tmp_path, rows, CLASSIFIER, epochs=1), *options)
    assert done.code == 1, done.output
    assert "FAILED (2 so far), training continues" in done.output
    assert "error: 2 saves in a row have failed, the last before step" in done.output
    assert len(history(tmp_path, "step")) < 14


def damaged(rows: Path, folder: Path) -> Path:
    """Copy the training set with one file cut short."""
    write_rows(folder / "train", 331, seed=1)
    write_rows(folder / "validation", 101, seed=2)
    path = folder / "train" / "part-1.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    return folder


def test_a_truncated_file_is_refused_by_name(tmp_path: Path, rows: Path) -> None:
    """A Parquet file that lost its end stops the run with 65 and the file's name."""
    done = start([config(tmp_path, damaged(rows, tmp_path / "data"), CLASSIFIER)])
    assert done.code == 65
    assert "part-1.parquet" in done.output
    assert "is truncated" in done.output


def test_data_that_changed_since_the_commit_is_refused(tmp_path: Path, rows: Path) -> None:
    """A run is not resumed on another dataset; its commits stay."""
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
        (["--data.train", "/nowhere"], 65, ["/nowhere: no manifest.json", "data import"]),
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
    """Each mistake ends with its exit code and a message that says what, where, and what to do; nothing is written."""
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


def test_a_custom_task_and_schema(tmp_path: Path) -> None:
    """The example trains a user's task on a user's columns, from outside the package, on one rank and on two alike."""
    example = ROOT / "examples" / "own_task"
    environ = {"PYTHONPATH": str(example)}
    made = subprocess.run([sys.executable, example / "make_data.py", tmp_path / "prices"], check=False, timeout=240)
    assert made.returncode == 0
    digests = set()
    for num_ranks in (None, 2):
        run_dir = tmp_path / str(num_ranks) / "run"
        places = ["--data.train", str(tmp_path / "prices"), "--run.dir", str(run_dir)]
        succeed(start_cold([str(example / "config.yaml"), *places], num_ranks=num_ranks, environ=environ))
        digests.add(result(run_dir.parent)["weights_sha256"])
    assert len(digests) == 1


def with_batch_norm(folder: Path, rows: Path, **changes: object) -> str:
    """Write the configuration of a classifier whose forward pass changes buffers."""
    task = {"path": "tests.tasks:WithBatchNorm", "params": {**PARAMS, **changes}}
    return config(folder, rows, {**CLASSIFIER, "task": task}, epochs=1)


def test_buffers_that_forward_passes_change_are_state(tmp_path: Path, rows: Path) -> None:
    """BatchNorm's statistics are those of one process at any world size, and come back with a commit."""
    succeed(start([with_batch_norm(tmp_path / "alone", rows)]))
    expected = result(tmp_path / "alone")
    for num_ranks in (2, 3, 4):
        folder = tmp_path / str(num_ranks)
        succeed(start([with_batch_norm(folder, rows)], num_ranks=num_ranks))
        found = result(folder)
        assert [found[key] for key in ("weights_sha256", "metrics")] == [
            expected[key] for key in ("weights_sha256", "metrics")
        ]
    path = with_batch_norm(tmp_path / "failed", rows, marker=str(tmp_path / "marker"), after=44)
    assert start([path]).code != 0
    second = succeed(start([path], num_ranks=3))
    assert "resumed from commits/" in second.output
    assert result(tmp_path / "failed")["weights_sha256"] == expected["weights_sha256"]


def test_batch_norm_across_ranks_is_refused(tmp_path: Path, rows: Path) -> None:
    """SyncBatchNorm would make the result depend on the world: refused before training, with the reason."""
    task = {"path": "tests.tasks:WithSyncBatchNorm", "params": PARAMS}
    done = start([config(tmp_path, rows, {**CLASSIFIER, "task": task})])
    assert done.code == 2
    assert "SyncBatchNorm (norm), whose statistics depend on the number of ranks: use BatchNorm" in done.output


def test_ranks_that_begin_with_other_weights_take_those_of_rank_0(tmp_path: Path, rows: Path) -> None:
    """A task that initialises with another library's generator trains one model all the same, as under DDP."""
    tree = {**CLASSIFIER, "task": {"path": "tests.tasks:OwnWeights", "params": PARAMS}}
    succeed(start([config(tmp_path / "alone", rows, tree)]))
    done = succeed(start([config(tmp_path / "two", rows, tree)], num_ranks=2))
    assert "ranks [1] began with other weights than rank 0 and take its weights" in done.output
    assert result(tmp_path / "two")["weights_sha256"] == result(tmp_path / "alone")["weights_sha256"]


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
    """Tensor and rank are named, nothing of any model is committed, and the job resumes from before the flip."""
    params = {**PARAMS, "marker": str(tmp_path / "flipped"), "after": 30, "rank": rank}
    path = config(tmp_path, rows, {**CLASSIFIER, "task": {"path": "tests.tasks:Flips", "params": params}})
    done = start([path], num_ranks=num_ranks)
    assert done.code == 1
    assert done.output.count(said) == num_ranks, done.output
    assert f"{said}, first in 'head.weight'" in done.output
    assert (tmp_path / "flipped").exists()
    succeed(start([path], num_ranks=num_ranks))
    assert result(tmp_path)["weights_sha256"] == result(alone)["weights_sha256"]


def test_a_rank_with_another_model_is_turned_away_with_the_first_tensor_that_differs(
    tmp_path: Path, rows: Path
) -> None:
    """Before anything is exchanged whose size follows from the model: that would abort the processes."""
    tree = {**CLASSIFIER, "task": {"path": "tests.tasks:WiderByRank", "params": PARAMS}}
    done = start([config(tmp_path, rows, tree)], num_ranks=2)
    assert sorted(done.codes) == [1, 2], done.output
    assert (
        "error: the first of the model's tensors that differs is 'positions float32 [16, 32]' here and "
        "'positions float32 [16, 16]' on rank 0: all nodes must have the same"
    ) in done.output
    assert not list((tmp_path / "run").glob("commits/*"))


def train_with_own_helper(rank: int, size: int, folder: str, port: int) -> None:
    """Be one rank of a job whose task has a helper module of this rank's node."""
    sys.path.insert(0, f"{folder}/{rank}")
    place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(size)}
    os.environ.update({**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    sys.stderr = Path(f"{folder}/{rank}.log").open("w", buffering=1)  # noqa: SIM115 - the process ends by `os._exit`
    run(Path(f"{folder}/config.yaml"), [])


@pytest.mark.parametrize("halves", ["0.5", "0.25"])
def test_a_rank_whose_task_has_another_helper_is_turned_away(tmp_path: Path, rows: Path, halves: str) -> None:
    """The models have equal shapes, and only what the task imports computes another loss."""
    for rank, factor in enumerate(("0.5", halves)):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "own_task.py").write_text(TASK_WITH_HELPER)
        (tmp_path / str(rank) / "own_helper.py").write_text(f"FACTOR = {factor}\n")
    config(tmp_path, rows, {**CLASSIFIER, "task": {"path": "own_task:Scaled", "params": PARAMS}}, max_steps=3)
    codes = run_ranks(train_with_own_helper, 2, str(tmp_path), free_ports(1)[0], may_fail=True)
    said = (tmp_path / "1.log").read_text()
    if halves == "0.5":
        assert codes == [0, 0], said
        return
    assert codes == [1, 2], said
    assert "error: the first of the task's modules that differs is 'own_helper " in said


TASK_WITH_HELPER = """
from dataclasses import replace

from elastic_train.tasks.text_classifier import TextClassifier


class Scaled(TextClassifier):
    def loss(self, model, batch):
        from own_helper import FACTOR

        loss = super().loss(model, batch)
        return replace(loss, total=loss.total * FACTOR)
"""
