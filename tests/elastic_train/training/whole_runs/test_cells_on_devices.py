"""Cells whose ranks exchange between devices, with a stand-in for these: the bits of cells of CPUs, or of no cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.conftest import start
from tests.elastic_train.training.jobs import average_of, config, result, succeed
from tests.elastic_train.training.whole_runs.test_cells import LANGUAGE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cells-on-devices")]  # runs to compare with
Parallel = Mapping[str, object]
MODEL = {"vocabulary": 64, "dim": 16, "depth": 4, "heads": 4, "kv_heads": 2, "dropout": 0.1, "tied": False}
EXPERTS = {**MODEL, "hidden": 24, "experts": 4, "shared_hidden": 8}
INTERLEAVED = {"pipeline": 2, "schedule": "interleaved"}
LONG = pytest.mark.long  # one with shards has what it has


def train(folder: Path, rows: Path, parallel: Parallel, num_ranks: int, task: str) -> object:
    """Return the hash of the weights, and of their average."""
    params = {"model": EXPERTS if "expert" in parallel else MODEL, "max_tokens": 16}
    keys: dict[str, object] = {**LANGUAGE, "task": {"path": task, "params": params}, "parallel": dict(parallel)}
    succeed(start([config(folder, rows, keys)], num_ranks=num_ranks))
    return result(folder)["weights_sha256"], result(folder)["metrics"], average_of(folder)


@pytest.fixture(scope="module")
def on_cpus(tmp_path_factory: pytest.TempPathFactory, few_rows: Path) -> Callable[[Parallel], object]:
    """What jobs with some degrees come to on CPUs, in one cell and without shards."""
    known = dict[str, object]()

    def found(parallel: Parallel) -> object:
        if (key := str(parallel)) not in known:
            folder = tmp_path_factory.mktemp("cpus")
            num_ranks = 1 if parallel.keys() <= {"expert"} else 2
            task = "chaos.tasks.paced_language:PacedLanguage"
            known[key] = train(folder, few_rows, parallel, num_ranks, task)
        return known[key]

    return found


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "expected"),
    [
        pytest.param({"tensor": 2}, 2, {"tensor": 2}, marks=LONG),
        ({"tensor": 2, "shards": "gradients", "recompute": "units"}, 4, {"tensor": 2}),
        pytest.param({"tensor": 2, "sequence": True}, 4, {"tensor": 2, "sequence": True}, marks=LONG),
        ({"tensor": 2, "sequence": True, "shards": "parameters"}, 4, {"tensor": 2, "sequence": True}),
        pytest.param({"pipeline": 2}, 2, {}, marks=LONG),
        ({"pipeline": 2, "shards": "gradients", "recompute": "units"}, 4, {}),
        pytest.param(INTERLEAVED, 4, {}, marks=LONG),
        ({**INTERLEAVED, "shards": "optimizer"}, 4, {}),
        pytest.param({"expert": 2}, 2, {"expert": 1}, marks=LONG),
        ({"expert": 2, **INTERLEAVED, "shards": "optimizer", "recompute": "selective"}, 4, {"expert": 1}),
        pytest.param({"context": 2}, 4, {"context": 2}, marks=LONG),
        ({"context": 2, "shards": "optimizer"}, 2, {"context": 2}),
    ],
    ids=str,
)
def test_devices_have_the_bits_of_cpus(
    tmp_path: Path,
    few_rows: Path,
    on_cpus: Callable[[Parallel], object],
    parallel: Parallel,
    num_ranks: int,
    expected: Parallel,
) -> None:
    """With dropout, clipping, an average, validations, commits, and a last step of one sample."""
    found = train(tmp_path, few_rows, parallel, num_ranks, "tests.device_task:PacedLanguage")
    assert found == on_cpus(expected)
