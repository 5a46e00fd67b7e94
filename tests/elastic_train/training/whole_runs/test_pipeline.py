"""Pipelines in whole runs: the hash of one process, for any number of stages, schedule and number of cells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from elastic_train.checkpoint import open_store
from elastic_train.checkpoint.commits.lookup import find
from elastic_train.cli.main import main
from tests.elastic_train.training.jobs import average_of, config, history, result, succeed
from tests.elastic_train.training.whole_runs.test_cells import newest_weights
from tests.memory_job import start

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pipeline")]  # one run to compare with

MODEL = {"vocabulary": 64, "dim": 16, "depth": 5, "heads": 4, "kv_heads": 2, "dropout": 0.1, "tied": False}
LANGUAGE: dict[str, object] = {
    "task": {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": {"model": MODEL, "max_tokens": 16}},
    "batch": {"global_batch": 30, "micro_batch": 6},
    "optimizer": {"lr": 0.01, "warmup_steps": 3, "schedule": "constant", "clip_norm": 0.2, "ema_decay": 0.9},
    "epochs": 1,
    "validation": {"every_steps": 4, "weights": "ema"},
    "checkpoint": {"every_steps": 3, "keep_last": 3},
}


def stages(num: int, *, kind: str = "1f1b") -> list[str]:
    return ["--parallel.pipeline", str(num), "--parallel.schedule", kind]


CHUNKS = stages(2, kind="interleaved")
LONG = pytest.mark.long  # other variants, or stretches of the runs in stretches, are of the same keys


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, few_rows: Path) -> Path:
    """A run of one process that holds the whole model."""
    folder = tmp_path_factory.mktemp("one")
    succeed(start([config(folder, few_rows, LANGUAGE)]))
    return folder


@pytest.mark.parametrize(
    ("num_ranks", "how"),
    [
        pytest.param(2, stages(2), marks=LONG),
        (4, [*stages(2, kind="gpipe"), "--parallel.bucket_mb", "0.001", "--run.audit_lanes", "1"]),
        (4, stages(4)),
        (6, [*stages(3), "--parallel.recompute", "units"]),
        (4, [*CHUNKS, "--parallel.recompute", "units", "--parallel.bucket_mb", "0.001", "--run.audit_lanes", "2"]),
        pytest.param(2, [*CHUNKS, "--parallel.recompute", "units"], marks=LONG),
        pytest.param(4, [*CHUNKS, "--parallel.bucket_mb", "0.001", "--run.audit_lanes", "2"], marks=LONG),
    ],
)
def test_stages_have_the_bits_of_one_process(
    tmp_path: Path, few_rows: Path, one_process: Path, num_ranks: int, how: list[str]
) -> None:
    """With dropout, which the first stages draw from before the last ones do, and a last step of fewer samples."""
    succeed(start([config(tmp_path, few_rows, LANGUAGE), *how], num_ranks=num_ranks))
    for what in ("weights_sha256", "metrics", "num_samples"):
        assert result(tmp_path)[what] == result(one_process)[what]
    assert average_of(tmp_path) == average_of(one_process)
    assert not [line for line in history(tmp_path, "event") if line["kind"] == "wrong_gradient"], "cells compute alike"


@pytest.mark.parametrize(
    "how",
    [
        ["--precision", "fp16", "--parallel.offload", "optimizer"],
        ["--optimizer.name", "muon"],
        ["--optimizer.name", "muon", "--parallel.shards", "optimizer", "--parallel.copies", "1"],
        pytest.param(["--compile", "true"], marks=LONG),
    ],
)
def test_chunks_have_the_bits_of_one_process_by_other_kernels_and_elsewhere(
    tmp_path: Path, few_rows: Path, how: list[str]
) -> None:
    """The first steps in half precision find the scale: a stage without a loss leaves out the same updates."""
    for folder, extra, num_ranks in ((tmp_path / "one", [], None), (tmp_path / "stages", CHUNKS, 4)):
        succeed(start([config(folder, few_rows, LANGUAGE), *how, *extra], num_ranks=num_ranks))
    assert result(tmp_path / "stages")["weights_sha256"] == result(tmp_path / "one")["weights_sha256"]
    assert average_of(tmp_path / "stages") == average_of(tmp_path / "one")


def test_stages_of_tensor_ranks_have_the_bits_of_one_stage(tmp_path: Path, few_rows: Path) -> None:
    """Four ranks that hold half of each matrix of half of the blocks, and two that hold half of each matrix."""
    tensor, found = ["--parallel.tensor", "2", "--max_steps", "2"], {}
    for num_stages, num_ranks in ((1, 2), (2, 4)):
        folder = tmp_path / str(num_stages)
        run = config(folder, few_rows, LANGUAGE)
        succeed(start([run, *tensor, *stages(num_stages)], num_ranks=num_ranks))
        found[num_stages] = result(folder)["weights_sha256"], result(folder)["metrics"], average_of(folder)
    assert found[1] == found[2]
    newest_weights(tmp_path / "2")


def test_commits_continue_with_any_stages_and_cells(tmp_path: Path, few_rows: Path, one_process: Path) -> None:
    """A commit has whole tensors, which torch's own reader and one process find, too; each stage writes its own."""
    run = config(tmp_path, few_rows, LANGUAGE)
    for until, num_stages, num_ranks in [(1, 2, 2), (2, 4, 4), (3, 1, 2), (4, 2, 4)]:
        succeed(start([run, *stages(num_stages), "--max_steps", str(until)], num_ranks=num_ranks))
        if until == 1:
            assert {files_of(tmp_path, f"model.{name}.weight") for name in ("embed", "blocks.1.mlp.up")} == {
                "__0_0.distcp"
            }
            assert {files_of(tmp_path, f"model.{name}.weight") for name in ("head", "blocks.2.mlp.up")} == {
                "__1_0.distcp"
            }
    newest_weights(tmp_path)
    succeed(start([run, *stages(3)], num_ranks=3))
    assert result(tmp_path)["weights_sha256"] == result(one_process)["weights_sha256"]
    assert average_of(tmp_path) == average_of(one_process)
    newest_weights(tmp_path)


def test_chunks_continue_over_one_cell_two_and_one(tmp_path: Path, few_rows: Path, one_process: Path) -> None:
    """Each stage writes the blocks of its chunks, which are not neighbours; stages of one chunk go on from them."""
    run, chunks = config(tmp_path, few_rows, LANGUAGE), stages(2, kind="interleaved")
    for until, num_ranks in ((2, 2), (3, 4), (4, 2)):
        succeed(start([run, *chunks, "--max_steps", str(until)], num_ranks=num_ranks))
        if until == 2:
            names = [f"model.blocks.{number}.mlp.up.weight" for number in range(5)]
            assert [files_of(tmp_path, name)[:3] for name in names] == ["__0", "__1", "__0", "__1", "__1"]
    newest_weights(tmp_path)
    succeed(start([run, *stages(2)], num_ranks=2))
    for what in ("weights_sha256", "metrics"):
        assert result(tmp_path)[what] == result(one_process)[what]
    assert average_of(tmp_path) == average_of(one_process)


def files_of(folder: Path, name: str) -> str:
    """Return which file of the newest commit has a tensor, of whose boxes there is one."""
    record = find(open_store(str(folder / "run")), None)
    metadata = dcp.FileSystemReader(folder / "run" / record.attempt).read_metadata()
    [found] = {place.relative_path for index, place in metadata.storage_data.items() if index.fqn == name}
    return str(found)


def test_validate_says_all_that_keeps_a_model_from_stages(
    tmp_path: Path, few_rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not take a start to learn of it, nor one for each reason; of a model that has them, what they cost."""
    with pytest.raises(SystemExit) as ended:
        main(["validate", config(tmp_path, few_rows, LANGUAGE), *stages(3)])
    assert ended.value.code in (None, 0)
    said = " ".join(capsys.readouterr().out.split())
    assert "3 stages, 1f1b; with all 5 lanes in one cell they wait 29 % of a step" in said
    with pytest.raises(SystemExit):
        main(["validate", config(tmp_path, few_rows, LANGUAGE), *stages(2, kind="interleaved")])
    said = " ".join(capsys.readouterr().out.split())
    assert "2 stages with 2 chunks each, interleaved; with all 5 lanes in one cell they wait 9 % of a step" in said
    own = {
        **LANGUAGE,
        "task": {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": {"model": {"depth": 2, "vocabulary": 64}}},
    }
    with pytest.raises(SystemExit) as ended:
        main(["validate", config(tmp_path, few_rows, own), *stages(3)])
    said = " ".join("".join(capsys.readouterr()).split())
    assert ended.value.code == 2
    for reason in ("task.params.model.depth: 2 in 3 stages", "task.params.model.tied: true, since"):
        assert reason in said
