"""A short soak with real nodes and signals, on a product with a bug: the verdict has to name the bug.

A counting model cannot show any of these bugs, since its sums are whole numbers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from chaos.cli import main
from chaos.judge.verdict import examine
from chaos.scenario.model import FOLDER
from chaos.tasks import planted_in_cells
from chaos.tasks.planted_bugs import BUGS, BuggyClassifier

LANGUAGE: dict[str, object] = {
    "lane_ms": 8,
    "max_tokens": 16,
    "model": {"vocabulary": 64, "dim": 16, "depth": 1, "heads": 2, "dropout": 0.2, "tied": False},
}
PARAMS = {"lane_ms": 8, "max_tokens": 16, "dim": 16, "depth": 1, "heads": 2, "dropout": 0.2, "vocabulary": 64}


def soaked(
    folder: Path, rows: Path, task: dict[str, object], count: int, name: str = "soak", faults: int = 2
) -> dict[str, str]:
    """Run a soak of `count` nodes with kills of workers only; return each invariant's result."""
    soak = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    tree = yaml.safe_load(Path(soak["config"]).read_text())
    tree["task"], tree["data"] = task, {"train": str(rows / "train"), "too_long": "truncate"}
    (folder / "config.yaml").write_text(yaml.safe_dump({**tree, "validation": {"every": None}}))
    soak |= {"config": str(folder / "config.yaml"), "etcd_members": 1, "tracker": False}
    soak |= {"nodes": {**soak["nodes"], "count": count, "forked": True}}
    soak |= {"soak": {"faults": faults, "burst": 1, "kinds": ["kill_worker"]}}
    (folder / "soak.yaml").write_text(yaml.safe_dump(soak))
    with pytest.raises(SystemExit) as left:
        main(["run", str(folder / "soak.yaml"), "--seed", "3", "--out", str(folder / "run"), "--json"])
    verdict = json.loads((folder / "run" / "verdict.json").read_text())
    assert (left.value.code == 0) == verdict["valid"]
    return {item["invariant"]: item["truth"] for item in verdict["invariants"]}


def columns(params: dict[str, object]) -> dict[str, object]:
    return {**params, "numeric": ["size"], "categorical": ["kind"]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "count"), [("wrong-tree", 4), ("rank-seeded-dropout", 2), ("moments-not-handed-over", 2)]
)
def test_a_bug_in_the_product_turns_the_soak_red(tmp_path: Path, rows: Path, plant: str, count: int) -> None:
    """Sums in another order, dropout by rank, a state without its moments: the bits differ from one rank's."""
    task = {"path": "chaos.tasks.planted_bugs:BuggyClassifier", "params": columns({**PARAMS, "plant": plant})}
    truths = soaked(tmp_path, rows, task, count)
    assert truths["hash"] == "false", truths
    assert {truths[name] for name in ("coverage", "sums", "lineage", "agreement")} == {"true"}, truths


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "invariant", "fields"),
    [
        ("compares-nothing", "hash", {"faults": [{"kind": "flip_memory", "node": 1, "at_step": 30}]}),
        ("applies-no-number", "finished", {"faults": [{"kind": "nan_loss", "node": 1, "at_step": 30}]}),
        (
            "reads-certificates-once",
            "liveness",
            {
                "faults": [{"kind": "rotate_cert", "at_step": 20}, {"kind": "kill_worker", "node": 1, "after_s": 0.5}],
                "tls": True,
            },
        ),
        (
            "lets-the-unfit-in",
            "unfit",
            {
                "faults": [{"kind": "unfit_node", "node": 1, "at_step": 30, "for_s": 5}],
                "orders": True,
                "set": {"max_steps": 900},
                "timeout_s": 240,
            },
        ),
        (None, None, {"faults": [{"kind": "flip_memory", "node": 1, "at_step": 30}]}),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "",
)
def test_a_bug_that_a_kind_of_fault_is_to_find(
    tmp_path: Path, rows: Path, plant: str | None, invariant: str | None, fields: dict[str, object]
) -> None:
    """Nobody compares, updates that are no numbers are used, certificates are read once: one fault shows each."""
    task: dict[str, object] = {"path": "chaos.tasks.paced_classifier:PacedClassifier", "params": columns({**PARAMS})}
    if plant is not None:
        task = {"path": "chaos.tasks.planted_bugs:BuggyClassifier", "params": columns({**PARAMS, "plant": plant})}
    tree = yaml.safe_load((FOLDER / "wrong-numbers.yaml").read_text())
    config = yaml.safe_load(Path(tree["config"]).read_text())
    config |= {"task": task, "data": {"train": str(rows / "train"), "too_long": "truncate"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**config, "validation": {"every": None}}))
    tree |= {"config": str(tmp_path / "config.yaml"), "set": {"max_steps": 150}, "timeout_s": 60, **fields}
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump({**tree, "nodes": {**tree["nodes"], "count": 2}}))
    with pytest.raises(SystemExit) as left:
        main(["run", str(tmp_path / "scenario.yaml"), "--seed", "3", "--out", str(tmp_path / "run"), "--json"])
    truths = {finding.invariant: finding.truth for finding in examine(tmp_path / "run").findings}
    assert (left.value.code == 0) == (invariant is None) and truths.get(str(invariant), "false") == "false", truths


@pytest.mark.long
def test_the_same_soak_without_a_bug_is_valid(tmp_path: Path, rows: Path) -> None:
    """The checks that find the planted bugs report nothing for a product without them."""
    task = {"path": "chaos.tasks.paced_classifier:PacedClassifier", "params": columns({**PARAMS})}
    truths = soaked(tmp_path, rows, task, 4)
    assert set(truths.values()) == {"true"}, truths


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "found"),
    [("two-cells-with-one-lane", "finished"), ("neighbours-part", "deaths"), ("stage-misses-a-step", "hash")],
)
def test_a_bug_in_cells_turns_their_soak_red(tmp_path: Path, rows: Path, plant: str, found: str) -> None:
    """A lane's samples read by two cells, a part of another place, a place that is a step behind."""
    params = {**LANGUAGE, "plant": plant}
    truths = soaked(
        tmp_path, rows, {"path": "chaos.tasks.planted_in_cells:BuggyLanguage", "params": params}, 2, "soak-cells"
    )
    assert truths[found] == "false", truths


@pytest.mark.long
def test_cells_survive_a_short_storm(tmp_path: Path, rows: Path) -> None:
    """Two cells of two ranks and their standbys, on two nodes: the checks that find planted bugs report nothing."""
    task = {"path": "chaos.tasks.paced_language:PacedLanguage", "params": LANGUAGE}
    truths = soaked(tmp_path, rows, task, 2, "soak-cells")
    assert set(truths.values()) == {"true"}, truths


def test_an_unknown_bug_is_refused() -> None:
    """A misspelt name would plant nothing, and the soak would be valid for that reason."""
    with pytest.raises(ValueError, match=f"no bug 'wrong-trees'; there are {', '.join(BUGS)}"):
        BuggyClassifier("wrong-trees")
    with pytest.raises(ValueError, match=f"no bug 'two-lanes'; there are {', '.join(planted_in_cells.BUGS)}"):
        planted_in_cells.BuggyLanguage("two-lanes")
