"""A mixture in a live world: losing a rank while sources begin new passes loses or repeats no sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from chaos.judge.checker import judge
from chaos.judge.evidence.applied import lineage_of
from chaos.judge.evidence.run_files import collect
from tests import memory_job, memory_live
from tests.conftest import write_rows
from tests.elastic_train.training.jobs import WITNESS, config, result, succeed
from tests.memory_job import Loss

NUM_ROWS, FEW_ROWS = 331, 29


@pytest.mark.slow
def test_a_lost_rank_costs_no_sample_of_any_source(tmp_path: Path, rows: Path) -> None:
    """The survivor continues at its position in each source; the judge confirms the count of every sample."""
    few = write_rows(tmp_path / "few", FEW_ROWS, seed=3)
    mixture = [{"source": str(rows / "train"), "weight": 3}, {"source": str(few), "weight": 2}]
    tree = {**WITNESS, "data": {"mixture": mixture}, "epochs": 2, "tracking": {"mlflow_uri": None}}
    succeed(memory_job.start([config(tmp_path / "alone", rows, tree)]))
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
