"""Cells whose ranks exchange between devices, with a stand-in for these: the bits of cells of CPUs, or of no cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.conftest import start as start_processes
from tests.elastic_train.training.jobs import average_of, config, result, succeed
from tests.elastic_train.training.whole_runs.test_cells import LANGUAGE
from tests.memory_job import start

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cells-on-devices")]  # runs to compare with
Parallel = Mapping[str, object]
MODEL = {"vocabulary": 64, "dim": 16, "depth": 4, "heads": 4, "kv_heads": 2, "dropout": 0.1, "tied": False}
EXPERTS = {**MODEL, "hidden": 24, "experts": 4, "shared_hidden": 8}
INTERLEAVED = {"pipeline": 2, "schedule": "interleaved"}
LARGEST: Parallel = {"expert": 2, **INTERLEAVED, "shards": "optimizer", "recompute": "selective"}


def write(folder: Path, rows: Path, parallel: Parallel, task: str = "chaos.tasks.paced_language:PacedLanguage") -> str:
    params = {"model": EXPERTS if "expert" in parallel else MODEL, "max_tokens": 16}
    keys: dict[str, object] = {**LANGUAGE, "task": {"path": task, "params": params}, "parallel": dict(parallel)}
    return config(folder, rows, keys)


def ended(folder: Path) -> object:
    """Return the hash of the weights, and of their average."""
    return result(folder)["weights_sha256"], result(folder)["metrics"], average_of(folder)


@pytest.fixture(scope="module")
def on_cpus(tmp_path_factory: pytest.TempPathFactory, few_rows: Path) -> Callable[[Parallel], object]:
    """What jobs with some degrees come to on CPUs, in one cell and without shards."""
    known = dict[str, object]()

    def found(parallel: Parallel) -> object:
        if (key := str(parallel)) not in known:
            folder = tmp_path_factory.mktemp("cpus")
            num_ranks = 1 if parallel.keys() <= {"expert"} else 2
            succeed(start([write(folder, few_rows, parallel)], num_ranks=num_ranks))
            known[key] = ended(folder)
        return known[key]

    return found


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "expected"),
    [
        ({"tensor": 2}, 2, {"tensor": 2}),
        ({"tensor": 2, "shards": "gradients", "recompute": "units"}, 4, {"tensor": 2}),
        ({"tensor": 2, "sequence": True, "shards": "parameters"}, 4, {"tensor": 2, "sequence": True}),
        ({"pipeline": 2, "shards": "gradients", "recompute": "units"}, 4, {}),
        ({**INTERLEAVED, "shards": "optimizer"}, 4, {}),
        (LARGEST, 4, {"expert": 1}),
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
    succeed(start([write(tmp_path, few_rows, parallel)], num_ranks=num_ranks, on_devices=True))
    assert ended(tmp_path) == on_cpus(expected)


def test_so_have_devices_of_processes(tmp_path: Path, few_rows: Path, on_cpus: Callable[[Parallel], object]) -> None:
    """Over gloo, each with a queue and a thread of its own."""
    run = write(tmp_path, few_rows, LARGEST, "tests.device_task:PacedLanguage")
    succeed(start_processes([run], num_ranks=4))
    assert ended(tmp_path) == on_cpus({"expert": 1})
