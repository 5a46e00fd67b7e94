"""Parameter groups in whole runs: one hash at any world size, and layers that are frozen until a run is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor

from elastic_train.checkpoint.commits.reader import read_record, read_state
from elastic_train.checkpoint.stores.open import open_store
from tests.elastic_train.training.jobs import CLASSIFIER, PARAMS, config, result, succeed
from tests.memory_job import start

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("parameter groups")]  # one reference run


def grouped(folder: Path, rows: Path, after: int | None = None) -> str:
    """Write the configuration of a run with groups, which fails once at the given loss of a process."""
    params = {**PARAMS, "depth": 2, "marker": str(folder / "failed"), "after": after or 0}
    return config(folder, rows, CLASSIFIER, task={"path": "tests.tasks:Grouped", "params": params}, epochs=1)


def commits(folder: Path) -> list[dict[str, Tensor]]:
    """Return the model of every commit, by step, and the names of the parameters with optimizer moments."""
    store = open_store(str(folder / "run"))
    keys = sorted(f"commits/{path.name}" for path in (folder / "run" / "commits").iterdir())
    states = [read_state(store, read_record(store, key)) for key in keys]
    return [{**state["model"], "trained": set(state["optimizer"]["state"])} for state in states]  # type: ignore[dict-item,call-overload,index]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Path:
    """A finished run of one process."""
    folder = tmp_path_factory.mktemp("grouped")
    succeed(start([grouped(folder, rows)]))
    return folder


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_any_world_gives_the_same_bits(tmp_path: Path, rows: Path, alone: Path, num_ranks: int) -> None:
    """Two groups and a frozen block, also if another world resumes a failed run."""
    path = grouped(tmp_path, rows, after=20 if num_ranks == 2 else None)
    if num_ranks == 2:
        assert start([path], num_ranks=3).code != 0
    done = succeed(start([path], num_ranks=num_ranks))
    assert ("Resuming from step" in done.output) == (num_ranks == 2) and "groups have changed" not in done.output
    assert result(tmp_path)["weights_sha256"] == result(alone)["weights_sha256"]
    first, last = commits(tmp_path)[0], commits(tmp_path)[-1]
    assert not any(name.startswith("blocks.0.") for name in last["trained"])
    same = {name for name in first if name != "trained" and first[name].equal(last[name])}
    assert same == {name for name in first if name.startswith("blocks.0.")}


def test_a_layer_is_thawed_when_a_run_resumes(tmp_path: Path, rows: Path) -> None:
    """Parameters that were trained before keep their moments; one hash in any world that resumes."""
    digests = set()
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        path = grouped(folder, rows, after=34)
        assert "planted failure" in start([path]).output
        done = succeed(start([path], num_ranks=num_ranks, environ={"THAWED": "1"}))
        assert "parameters that were not trained begin as at a first step: blocks.0." in done.output
        assert any(name.startswith("blocks.0.") for name in commits(folder)[-1]["trained"])
        digests.add(json.dumps(result(folder)["weights_sha256"]))
    assert len(digests) == 1
