"""The files of a real job after one of its ranks runs out of memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_train.insight.phases import FOLDER, memory_facts_of
from elastic_train.runs.report import report_on
from elastic_train.system.failpoints import VARIABLE, arm
from tests.conftest import start
from tests.elastic_train.training.jobs import CLASSIFIER, config, history

pytestmark = pytest.mark.slow
LANES = 4


def test_a_rank_without_memory_leaves_a_snapshot_and_says_what_to_change(tmp_path: Path, rows: Path) -> None:
    """The error is raised unchanged with the rank's position, its file and the remedies; the report names the file."""
    points, run = tmp_path / "points", tmp_path / "run"
    points.mkdir()
    arm(points, "backward", "oom", 2 * LANES + 1)
    done = start([config(tmp_path, rows, CLASSIFIER)], num_ranks=2, environ={VARIABLE: str(points)})
    assert done.codes == (1, 1), done.output
    [path] = (run / FOLDER).iterdir()
    found = json.loads(path.read_text())
    rank, lane = found["rank"], found["lane"]
    assert path.name == f"00000001-{rank:05d}.json" and found["num_ranks"] == 2
    assert lane in range(2 * rank, 2 * rank + 2) and found["step"] in (2, 3, 4)
    assert "torch.OutOfMemoryError: planted at backward\n" in done.output
    said = f"out of memory: rank {rank}, step {found['step']}, lane {lane}, cpu: at its peak "
    assert said in done.output and f"; snapshot: {path}. To use less memory: parallel.recompute: units;" in done.output
    facts = memory_facts_of(found["memory"])
    assert facts is not None and facts.parts["weights"] == facts.parts["gradients"] > 0
    assert found["largest"] and any("torch.autograd" in line or "reach" in line for line in found["traceback"])
    lines = [line for line in history(tmp_path, "memory") if line["rank"] == rank]
    assert [line["step"] for line in lines][-1] == found["step"] - 1, "what it had before is in its history"
    [note] = [note for note in report_on(str(run), with_coverage=False).notes if "ran out of memory" in note]
    assert note.startswith(f"rank {rank} on {found['host']} ran out of memory in step {found['step']} (term 1): {path}")
