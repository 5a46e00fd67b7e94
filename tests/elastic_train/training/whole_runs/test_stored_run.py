"""A run made before the modules had their present names is found, verified and resumed to the same bits.

It has format 3, so its first half was clipped by torch's norm. No step of its second
half clips a gradient. Weight decay applied to norms and biases, as its configuration says.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

import elastic_train as et
from elastic_train.checkpoint.commits.reader import verify
from tests.conftest import run_source
from tests.elastic_train.training.whole_runs.stored import STORED, copy_stored_run

pytestmark = pytest.mark.slow

EXPECTED = json.loads((STORED / "expected.json").read_text())
RESUME = """
import json, elastic_train as et
result = et.train("config.yaml")
print(json.dumps([result.status, result.step, result.weights_sha256, result.coverage.count]))
"""


def rounds_alike() -> bool:
    """Return True if this machine has the library and the instructions that made the stored run."""
    return (EXPECTED["torch"], EXPECTED["cpu"]) == (torch.__version__, torch.backends.cpu.get_cpu_capability())


def test_the_stored_commit_is_found_and_valid() -> None:
    store = et.open_store(str(STORED / "run"))
    found = et.discover(store)
    assert found.head is not None and found.skipped == ()
    assert found.head.key == "commits/00000001-000000000014.json"
    verify(store, found.head)
    assert {"model", "optimizer"} <= set(et.read_state(store, found.head))


def test_the_names_that_the_run_kept_still_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task's dotted path is part of a run's identity, so it may not move; nor may the digest of those keys change."""
    monkeypatch.chdir(STORED)
    head = et.discover(et.open_store("run")).head
    assert head is not None
    for path in ("config.yaml", "run/config.yaml"):
        config = et.load_config(path)
        module, _, name = config.task.path.partition(":")
        assert getattr(importlib.import_module(module), name)
        assert config.identity() == head.config_digest
    assert et.load_manifest("rows/train").digest == head.manifest_digest


def test_the_stored_run_is_resumed_to_its_end(tmp_path: Path) -> None:
    """One process applies the second half of a two-rank run; the weights equal those that two ranks ended with."""
    folder, end = copy_stored_run(tmp_path), EXPECTED["result"]
    done = run_source(RESUME, cwd=folder)
    assert done.returncode == 0, done.stderr
    status, step, weights, count = json.loads(done.stdout.splitlines()[-1])
    assert "Resuming from step 14 (commits/00000001-000000000014.json" in done.stdout
    assert "00000001-000000000014.json is of an older version, which computed the norm" in done.stdout
    assert (status, step, count) == ("done", end["step"], end["coverage"]["count"])
    result = json.loads((folder / "run" / "result.json").read_text())
    assert (result["term"], result["coverage"]) == (2, end["coverage"])
    head = et.discover(et.open_store(str(folder / "run"))).head
    assert head is not None and [(each.term, each.lo, each.hi) for each in head.intervals] == [(1, 0, 14), (2, 14, 28)]
    if not rounds_alike():
        pytest.skip("the stored weights were computed with another torch or other instructions")
    assert weights == end["weights_sha256"]
    assert result["metrics"].items() >= end["metrics"].items()
