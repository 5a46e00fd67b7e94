"""What decides what is computed is the same on all ranks, or a rank that differs learns which keys."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from elastic_train.config.schema import Config
from elastic_train.errors import ConfigError
from elastic_train.job.plan import Plan
from elastic_train.parallel.group import Group
from elastic_train.tasks.text_classifier import TextClassifier
from elastic_train.tasks.witness import Witness
from elastic_train.world import uniformity
from elastic_train.world.uniformity import check_alike, deciding, differing_kernels, kernels_of, source_digest
from tests.conftest import run_ranks

pytestmark = pytest.mark.slow


def plan_with(
    changes: dict[str, dict[str, object]],
    digest: str = "rows",
    validation: str | None = None,
    task: object = None,
) -> Plan:
    config = Config.model_validate({"data": {"train": "here"}, **changes})
    feed = SimpleNamespace(validation_digest=validation)
    return SimpleNamespace(config=config, task=task, manifest=SimpleNamespace(digest=digest), feed=feed)  # type: ignore[return-value]


PLANS = [
    plan_with({}),
    plan_with(
        {
            "data": {"train": "/elsewhere", "cache_dir": "/scratch"},
            "run": {"dir": "mine"},
            "tracking": {"mlflow_uri": None},
            "checkpoint": {"url": "s3://bucket/run"},
        }
    ),
    plan_with({"optimizer": {"clip_norm": 0.5}, "validation": {"every_steps": 7}, "task": {"params": {"dim": 8}}}),
    plan_with({}, digest="other rows"),
    plan_with({}),
    plan_with({}, validation="held out", task=TextClassifier(vocabulary=64)),
]
GROUPING = ["2 parameters, rate 0.1"]
OTHER_GROUPING = ["1 parameters, rate 0.1", "1 parameters, rate 0.01"]


def compare(rank: int, size: int, folder: str) -> None:
    group = Group(rank, size, FileStore(f"{folder}/store", size), 60)
    try:
        check_alike(group, PLANS[rank], OTHER_GROUPING if rank == 4 else GROUPING)
        problems: list[str] = []
    except ConfigError as error:
        problems = list(error.problems)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(problems))
    group.close()


def test_a_rank_that_differs_from_rank_0_learns_in_which_keys(tmp_path: Path) -> None:
    """Paths may differ from node to node; all else that decides is named with both values."""
    run_ranks(compare, len(PLANS), str(tmp_path))
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(len(PLANS))]
    assert found[:2] == [[], []]
    assert [problem.partition(" is ")[0] for problem in found[2]] == [
        "optimizer.clip_norm",
        "task.params",
        "validation.every_steps",
    ]
    assert found[2][0] == "optimizer.clip_norm is 0.5 here and 1.0 on rank 0: all nodes must have the same"
    assert [problem.partition(" is ")[0] for problem in found[3]] == ["the training set's digest"]
    differing = f"the list of parameter groups is {OTHER_GROUPING!r} here and {GROUPING!r} on rank 0"
    assert found[4] == [f"{differing}: all nodes must have the same"]
    assert [problem.partition(" is ")[0] for problem in found[5]] == [
        "the task's source",
        "the validation set's digest",
    ]


def compare_kernels(rank: int, size: int, folder: str) -> None:
    group = Group(rank, size, FileStore(f"{folder}/store", size), 60)
    facts = {"device": "AVX512", "torch": "2", "numpy": "2", "processor": "one" if rank < 2 else "another"}
    with patch.object(uniformity, "kernels_of", lambda device: facts):
        lines = differing_kernels(group, torch.device("cpu"))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(lines))
    group.close()


def test_every_rank_learns_which_machines_round_otherwise(tmp_path: Path) -> None:
    run_ranks(compare_kernels, 3, str(tmp_path))
    lines = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert lines == [["rank 2 has processor another, not one"]] * 3


def test_a_task_is_known_by_its_source_and_not_by_its_name() -> None:
    assert source_digest(TextClassifier) == source_digest(
        type("Another", (TextClassifier,), {"__module__": "builtins"})
    )
    assert source_digest(TextClassifier) not in ("", source_digest(Witness))
    assert set(kernels_of(torch.device("cpu"))) >= {"device", "torch", "numpy", "pyarrow", "processor"}


def test_every_compared_key_exists() -> None:
    """A renamed key would no longer be compared."""
    assert {"run.seed", "data.too_long", "checkpoint.every_steps", "max_steps", "batch.micro_batch"} <= set(
        deciding(PLANS[0])
    )
