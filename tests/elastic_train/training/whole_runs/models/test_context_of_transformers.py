"""Models of transformers under context parallelism, in whole runs: one hash in cells and stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.elastic_train.training.jobs import average_of, losses, result, succeed
from tests.elastic_train.training.whole_runs.compared import TERMS, newest_weights
from tests.elastic_train.training.whole_runs.models.test_stages_of_transformers import QWEN3, job, stages
from tests.memory_job import start
from tests.rounding import assert_same_but_for_rounding

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]  # one process imports transformers

CONTEXT, TENSOR = ["--parallel.context", "2"], ["--parallel.tensor", "2"]


@pytest.fixture(scope="module", autouse=True)
def transformers() -> Any:
    """Skip where transformers is not installed."""
    return pytest.importorskip("transformers")


def test_rows_of_transformers_have_one_hash_in_cells_and_in_stages(tmp_path: Path, few_rows: Path) -> None:
    """Without attention dropout, with and without tensor ranks, the results equal whole rows' up to rounding."""
    found, none = {}, {"attention_dropout": 0.0}
    for name, changes, num_ranks, how in (
        ("one cell", {}, 2, CONTEXT),
        ("two cells", {}, 4, [*CONTEXT, "--parallel.recompute", "units"]),
        ("stages", {}, 4, [*CONTEXT, *stages(2, kind="interleaved")]),
        ("whole rows", none, 1, []),
        ("parts", none, 2, CONTEXT),
        ("heads", none, 4, [*CONTEXT, *TENSOR]),
    ):
        folder = tmp_path / name
        run = job(folder, few_rows, {"config": {**QWEN3, **changes}})
        succeed(start([run, *how, "--max_steps", "2"], num_ranks=num_ranks))
        found[name] = result(folder)["weights_sha256"], result(folder)["metrics"], average_of(folder), losses(folder)
    assert found["one cell"] == found["two cells"] == found["stages"]
    whole = newest_weights(tmp_path / "whole rows")
    for name in ("parts", "heads"):
        assert_same_but_for_rounding(losses(tmp_path / name), losses(tmp_path / "whole rows"), TERMS)
        mine = newest_weights(tmp_path / name)
        for key, tensor in whole.items():
            torch.testing.assert_close(mine[key], tensor, rtol=0, atol=2e-5)
