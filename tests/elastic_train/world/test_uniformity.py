"""What decides what is computed is the same on all ranks, or a rank that differs learns which keys."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import FileStore  # type: ignore[attr-defined]

from elastic_train.config.schema import Config
from elastic_train.errors import ConfigError
from elastic_train.job.plan import Plan
from elastic_train.parallel.group import Group
from elastic_train.world.uniformity import check_alike, deciding
from tests.conftest import run_ranks

pytestmark = pytest.mark.slow


def plan_with(changes: dict[str, dict[str, object]], digest: str = "rows") -> Plan:
    config = Config.model_validate({"data": {"train": "here"}, **changes})
    return SimpleNamespace(config=config, manifest=SimpleNamespace(digest=digest))  # type: ignore[return-value]


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


def test_every_compared_key_exists() -> None:
    """A renamed key would no longer be compared."""
    assert {"run.seed", "data.too_long", "checkpoint.every_steps", "max_steps", "batch.micro_batch"} <= set(
        deciding(PLANS[0])
    )
