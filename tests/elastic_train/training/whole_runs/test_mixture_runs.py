"""A mixture in whole runs: one hash at any world size and after a kill; every sample is accounted for by source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import elastic_train as et
from chaos.judge.checker import judge
from chaos.judge.evidence.applied import lineage_of
from chaos.judge.evidence.run_files import collect
from elastic_train.checkpoint.audit.coverage_proof import audit
from elastic_train.tracking.metric_log import final_metrics
from tests import memory_live
from tests.conftest import start as start_processes
from tests.conftest import write_rows
from tests.elastic_train.training.jobs import CLASSIFIER, PARAMS, WITNESS, config, history, result, succeed
from tests.memory_job import AT_SECOND_COMMIT, Loss, start

pytestmark = pytest.mark.slow

NUM_ROWS, FEW_ROWS = 331, 57


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source that completes several passes before the training set completes one."""
    return write_rows(tmp_path_factory.mktemp("few") / "few", FEW_ROWS, seed=3)


def mixed(folder: Path, rows: Path, few: Path, tree: dict[str, object], **changes: object) -> str:
    """Write the configuration of a job that takes 7 samples of the training set to 3 of the other source."""
    mixture = [{"source": str(rows / "train"), "weight": 0.7}, {"source": str(few), "weight": 0.3}]
    data = {"mixture": mixture, "validation": str(rows / "validation"), "too_long": "truncate"}
    return config(folder, rows, tree, **{"data": data, "epochs": 1, **changes})


def manifests(rows: Path, few: Path) -> list[et.Manifest]:
    return [et.load_manifest(str(rows / "train")), et.load_manifest(str(few))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, rows: Path, few: Path) -> Path:
    """The folder of a run of one process."""
    folder = tmp_path_factory.mktemp("mixture")
    succeed(start([mixed(folder, rows, few, CLASSIFIER)]))
    return folder


def test_a_result_and_its_metrics_say_how_much_of_each_source_was_trained_on(
    alone: Path, rows: Path, few: Path
) -> None:
    """The commits prove it; the job ends with the step in which its slowest source completes one pass."""
    found = result(alone)
    steps = -(-NUM_ROWS * 10 // 7 // 24)
    assert (found["step"], found["num_samples"], found["epochs"]) == (steps, NUM_ROWS + FEW_ROWS, 1)
    big, small = found["sources"]  # type: ignore[misc]
    assert big == {"name": "train", "num_samples": NUM_ROWS, "share": 7, "applied": big["applied"], "epochs": 1}
    assert small == {"name": "few", "num_samples": FEW_ROWS, "share": 3, "applied": small["applied"], "epochs": 2}
    assert big["applied"] + small["applied"] == 24 * steps == found["coverage"]["count"]  # type: ignore[index]
    values = final_metrics(alone / "run")
    assert [values[f"train/samples/{name}"] for name in ("train", "few")] == [big["applied"], small["applied"]]
    assert {(line["epoch"], line["lo"]) for line in history(alone, "step")} == {(0, 6 * step) for step in range(steps)}
    found_by = audit(et.open_store(str(alone / "run")), manifests(rows, few))
    assert (found_by.exit_code, found_by.num_epochs) == (0, 1)


def test_another_world_gives_the_same_bits(tmp_path: Path, rows: Path, few: Path, alone: Path) -> None:
    """The second run shards its state; its sums and shards use the same tables."""
    shards = ["--parallel.shards", "gradients"]
    succeed(start([mixed(tmp_path, rows, few, CLASSIFIER), *shards], num_ranks=3))
    keys = ("weights_sha256", "metrics", "coverage", "sources")
    assert {key: result(tmp_path)[key] for key in keys} == {key: result(alone)[key] for key in keys}


def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, rows: Path, few: Path, alone: Path
) -> None:
    """Killed at its second commit; four ranks resume from the first with the sums of sources that are mid-pass."""
    path = mixed(tmp_path, rows, few, CLASSIFIER)
    assert start([path], num_ranks=2, lose=AT_SECOND_COMMIT).code != 0
    done = succeed(start([path], num_ranks=4))
    assert "Resuming from step" in done.output
    keys = ("weights_sha256", "metrics", "coverage", "sources")
    assert {key: result(tmp_path)[key] for key in keys} == {key: result(alone)[key] for key in keys}
    refused = start([path, "--data.mixture.1.weight", "0.4", "--epochs", "2"])
    assert refused.code == 2 and "7 train : 3 few): data.mixture must stay as it was" in refused.output


def test_what_cannot_be_read_of_a_source_is_left_out_of_it_alone(tmp_path: Path, rows: Path) -> None:
    """The witness counts each sample as often as its source was passed, except those of the damaged row group."""
    few = write_rows(tmp_path / "few", FEW_ROWS, seed=3)
    part = few / "part-1.parquet"
    content = part.read_bytes()
    part.write_bytes(content[:60] + bytes(80) + content[140:])
    path = mixed(tmp_path, rows, few, WITNESS, epochs=2)
    done = succeed(start([path, "--data.quarantine", "[unreadable]", "--run.forensic", "true"], num_ranks=2))
    assert "QUARANTINED: row group 0 of few/part-1.parquet, samples [350, 367)" in done.output
    counts = np.load(tmp_path / "run" / "witness.npy")
    big, small = result(tmp_path)["sources"]  # type: ignore[misc]
    of_few = np.delete(counts[NUM_ROWS:], range(350 - NUM_ROWS, 367 - NUM_ROWS))
    assert not counts[350:367].any()
    assert set(counts[:NUM_ROWS]) <= {2, 3} and set(of_few) <= {small["epochs"], small["epochs"] + 1}
    assert (counts[:NUM_ROWS].sum(), of_few.sum()) == (big["applied"], small["applied"])
    found = audit(et.open_store(str(tmp_path / "run")), manifests(rows, few))
    assert found.exit_code == 0, found.wrong


def test_a_sample_that_is_repeated_ends_training_where_its_source_is_passed(
    tmp_path: Path, rows: Path, few: Path
) -> None:
    """The error names the source, and no commit has the step."""
    task = {"path": "tests.tasks:Miscounts", "params": {**PARAMS, "how": "repeat"}}
    path = mixed(tmp_path, rows, few, {**CLASSIFIER, "task": task}, checkpoint={"every": "1 steps"})
    done = start_processes([path])
    assert done.code == 65, done.output
    assert "the samples of source 'few' were not applied once in each of its 1 epochs" in done.output
    head = et.discover(et.open_store(str(tmp_path / "run"))).head
    assert head is None or head.step * 24 * 3 // 10 <= FEW_ROWS


def test_a_lost_rank_costs_no_sample_of_any_source(tmp_path: Path, rows: Path) -> None:
    """The survivor continues at its position in each source; the judge confirms the count of every sample."""
    fewer = write_rows(tmp_path / "few", 29, seed=3)
    mixture = [{"source": str(rows / "train"), "weight": 3}, {"source": str(fewer), "weight": 2}]
    tree = {**WITNESS, "data": {"mixture": mixture}, "epochs": 2, "tracking": {"mlflow_uri": None}}
    succeed(start([config(tmp_path / "alone", rows, tree)]))
    done = memory_live.start([config(tmp_path, rows, tree)], num_ranks=2, losses=[Loss(1, 12, "backward")])
    assert sorted(done.codes) == [-9, 0, 0], done.output
    run = collect(tmp_path / "run")
    assert max(applied.term for applied in lineage_of(run)) > 1, done.output
    keys = ("weights_sha256", "coverage", "sources", "step")
    assert {key: result(tmp_path)[key] for key in keys} == {key: result(tmp_path / "alone")[key] for key in keys}
    big, small = result(tmp_path)["sources"]  # type: ignore[misc]
    counts = np.load(tmp_path / "run" / "witness.npy")
    assert set(counts[:NUM_ROWS]) <= {2, 3} and counts[:NUM_ROWS].sum() == big["applied"]
    assert counts[NUM_ROWS:].min() >= small["epochs"] >= 15 and counts[NUM_ROWS:].sum() == small["applied"]
    truths = {each.invariant: each for each in judge(run, collect(tmp_path / "alone" / "run"))}
    for invariant in ("coverage", "sums", "witness", "agreement", "partition", "finished"):
        assert truths[invariant].truth == "true", truths[invariant]
