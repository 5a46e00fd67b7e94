"""A run in progress can be judged at any time; one that is stuck is judged up to its last step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from chaos.judge.evidence.run_files import collect, whole
from chaos.judge.verdict import FAULTED, examine, so_far
from tests.chaos.recorded import ROWS, record


@pytest.fixture
def going_on(tmp_path: Path) -> Path:
    """The recorded run before its last commit: no result, and no record of its end; a node has already ended."""
    folder = record(tmp_path / "run")
    faulted = folder / FAULTED
    (faulted / "result.json").unlink()
    (faulted / "witness.npy").unlink()
    data = tmp_path / "data"
    data.mkdir()
    (data / "manifest.json").write_text(json.dumps({"files": [{"row_groups": [ROWS - 1, 1]}]}))
    config = yaml.safe_load((faulted / "config.yaml").read_text())
    (faulted / "config.yaml").write_text(yaml.safe_dump({**config, "data": {"train": str(data)}}))
    path = faulted / "history" / "chaos.jsonl"
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["op"] != "clean"]
    path.write_text("".join(f"{line}\n" for line in kept))
    last = max((faulted / "commits").glob("*.json"))
    last.unlink()
    for path in (faulted / "history").glob("0*.jsonl"):
        lines = [
            line for line in path.read_text().splitlines() if json.loads(line).get("key") != f"commits/{last.name}"
        ]
        path.write_text("".join(f"{line}\n" for line in lines))
    return folder


def truths(folder: Path) -> dict[str, str]:
    return {finding.invariant: finding.truth for finding in examine(folder).findings}


def test_what_has_happened_so_far_is_judged(going_on: Path) -> None:
    """Every known statement about a run in progress is true; whether it ended is unknown."""
    found = truths(going_on)
    true = {
        "agreement",
        "partition",
        "coverage",
        "lineage",
        "fencing",
        "durability",
        "atomicity",
        "heads",
        "sums",
        "rpo",
        "faults",
    }
    assert {name for name in true if found[name] != "true"} == set(), examine(going_on).findings
    assert found["finished"] == "unknown"


def test_steps_after_the_newest_commit_are_not_judged_yet(going_on: Path) -> None:
    """They may still be rolled back, and some ranks have not recorded theirs."""
    run = collect(going_on / FAULTED)
    newest = max(whole(line, "step") for line in run.of("commit"))
    assert max(whole(line, "step") for line in run.of("step")) > newest
    cut = so_far(run)
    assert max(whole(line, "step") for line in cut.of("step")) == newest == (cut.result or {})["step"]


def test_damage_is_seen_before_the_end(going_on: Path) -> None:
    """A missing step is found while the run is in progress."""
    for path in (going_on / FAULTED / "history").glob("0*.jsonl"):
        lines = [line for line in path.read_text().splitlines() if json.loads(line).get("step") != 24]
        path.write_text("".join(f"{line}\n" for line in lines))
    assert truths(going_on)["coverage"] == "false"


def test_a_run_that_got_stuck_is_false(going_on: Path) -> None:
    """It did not end or recover; the rest is judged."""
    with (going_on / FAULTED / "history" / "chaos.jsonl").open("a") as file:
        file.write(json.dumps({"op": "stuck", "t": 1_900_000_000.0, "why": "nobody trains"}) + "\n")
    found = truths(going_on)
    assert (found["finished"], found["liveness"], found["coverage"]) == ("false", "false", "true")
