"""Scenarios from end to end: real torchrun nodes, a real etcd and real signals, judged from files alone."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from chaos.cli import main
from chaos.judge.checker import judge
from chaos.judge.evidence.applied import pids_of
from chaos.judge.evidence.run_files import collect, items, whole
from chaos.planted.catalogue import PLANTED
from tests.elastic_train.training.live.test_live import history

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("forked nodes")]  # one process imports what the nodes need

CONSTANT = {"name": "sgd", "lr": 1.0, "weight_decay": 0, "clip_norm": None, "warmup_steps": 0, "schedule": "constant"}
WITNESS: dict[str, object] = {
    "task": {"path": "elastic_train.tasks.witness:Witness", "params": {"lane_ms": 12}},
    "batch": {"global_batch": 30, "micro_batch": 6},
    "optimizer": CONSTANT,
    "epochs": 20,
    "validation": {"every": None},
    "checkpoint": {"every": "12 steps"},
}
FORKED = {"lease_ttl_s": 10, "forked": True}
PARAMS = {"max_tokens": 16, "dim": 16, "depth": 1, "heads": 2, "dropout": 0.2, "vocabulary": 64}
CLASSIFIER: dict[str, object] = {
    "task": {
        "path": "chaos.tasks.paced_classifier:PacedClassifier",
        "params": {"lane_ms": 12, **PARAMS, "numeric": ["size"], "categorical": ["kind"]},
    },
    "batch": {"global_batch": 24, "micro_batch": 6},
    "optimizer": {"lr": 0.01, "warmup_steps": 3},
    "epochs": 15,
    "validation": {"every": "50 steps"},
    "checkpoint": {"every": "12 steps", "keep_last": 2},
}


UNTIL = {
    "elastic_train.tasks.witness:Witness": "tests.tasks:Witness",
    "chaos.tasks.paced_classifier:PacedClassifier": "tests.tasks:PacedUntil",
}


def paced(config: dict[str, object], lane_ms: float, until: Path) -> dict[str, object]:
    """Return a configuration's task at another pace, until a file exists.

    A few slow steps span the faults as well as many fast ones, and leave some for when a lost node returns.
    """
    task = config["task"]
    assert isinstance(task, dict)
    params = {**task["params"], "lane_ms": lane_ms, "until": str(until)}
    return {"task": {"path": UNTIL[task["path"]], "params": params}}


@contextlib.contextmanager
def once_all_are_back(run: Path, size: int, until: Path) -> Iterator[None]:
    """Create a file, during the code inside, when a world of `size` ranks trains after a lost node was started."""
    is_over = threading.Event()

    def is_back() -> bool:
        lines: list[dict[str, Any]] = history(run / "faulted")
        started = [line["t"] for line in lines if line["op"] == "fault" and line["kind"] == "start_node"]
        whole = {line["term"] for line in lines if line["op"] == "form" and line["world"] == size}
        steps = (line["t"] for line in lines if line["op"] == "step" and line["term"] in whole)
        return bool(started) and any(at > started[-1] for at in steps)

    def wait() -> None:
        while not is_over.wait(0.1):
            if is_back():
                until.touch()
                return

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        yield
    finally:
        is_over.set()
        waiting.join()


def scenario(folder: Path, rows: Path, config: dict[str, object], **fields: object) -> str:
    """Write a scenario and the configuration of its job below `folder`."""
    data = {"train": str(rows / "train"), "validation": str(rows / "validation"), "too_long": "truncate"}
    (folder / "config.yaml").write_text(yaml.safe_dump({"run": {"seed": 5}, "data": data, **config}))
    described = {"name": "tested", "description": "a test", "config": str(folder / "config.yaml"), "timeout_s": 280}
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump({**described, **fields}))
    return str(path)


def verdict_of(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run a scenario; return its verdict, which must be the last printed line and agree with the exit code."""
    with pytest.raises(SystemExit) as left:
        main(["run", *arguments, "--json"])
    printed = capfd.readouterr()
    fields: dict[str, Any] = json.loads(printed.out.splitlines()[-1]) if printed.out else {}
    assert (left.value.code == 0) == fields.get("valid"), printed.err
    return fields


def broken(verdict: dict[str, Any]) -> str:
    """Return why a verdict is not VALID: a list of all invariants would be truncated before the relevant ones."""
    return "\n".join(f"{each['invariant']}: {each['why']}" for each in verdict["invariants"] if each["truth"] != "true")


START, FIX, NOTHING = ("start", 75), ("fix", 65), ("nothing", 0)
WHY: dict[str, list[tuple[str, tuple[str, int]]]] = {
    "four worlds": [("kill_worker", START), ("kill_node", START), ("stop_node", START), ("end", NOTHING)],
    "live": [("kill_worker", START), ("kill_node", START), ("end", NOTHING)],
    "errors": [("raise", FIX), ("kill_worker", START), ("oom", FIX), ("kill_job", START), ("end", NOTHING)],
}
"""The advice of `status --why` and its exit code: after each fault that ends processes, and at the job's end."""


def answers(folder: Path) -> list[tuple[str, tuple[str, int]]]:
    """Return the advice and exit codes that the executor got; blame is checked by the verdict."""
    run = collect(folder / "faulted")
    kinds = {line["number"]: str(line["kind"]) for line in run.of("fault")}
    said = [(line, (str(line["do"]), whole(line, "exit_code"))) for line in run.of("why")]
    return [(kinds[line["fault"]] if "fault" in line else "end", advice) for line, advice in said]


@pytest.mark.usefixtures("weights_loaded_once")
def test_faults_change_no_bit_through_four_worlds(
    tmp_path: Path, rows: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A classifier with dropout on 3, 2, 1 and 2 ranks, its leader killed once: every sample counts once, the weights
    are those of the run without faults, and damage to the run is found."""
    faults = [
        {"kind": "kill_worker", "node": "other", "within": [0.07, 0.1]},
        {"kind": "kill_node", "node": "leader", "within": [0.2, 0.25]},
        {"kind": "stop_node", "node": "other", "within": [0.35, 0.4]},
        {"kind": "start_node", "node": "lost", "within": [0.5, 0.55]},
    ]
    until = tmp_path / "until"
    config = {**CLASSIFIER, **paced(CLASSIFIER, 36, until), "epochs": 10}
    path = scenario(tmp_path, rows, config, nodes={"count": 3, **FORKED}, faults=faults)
    with once_all_are_back(tmp_path / "run", 2, until):
        found = verdict_of([path, "--seed", "1", "--out", str(tmp_path / "run")], capfd)
    assert found["valid"], broken(found)
    assert answers(tmp_path / "run") == WHY["four worlds"]
    assert "it named the right process 2 times" in str(found["invariants"])
    assert found["weights_sha256"] == found["reference_weights_sha256"]
    assert found["coverage"] == {"min": 1, "max": 1, "samples": 331}
    assert isinstance(found["rpo_steps"], int)
    assert 0 < found["rpo_steps"] < 12
    validation = found["validation"]
    assert isinstance(validation, dict)
    assert validation["macro_f1"] == validation["reference_macro_f1"]
    evidence = collect(tmp_path / "run" / "faulted")
    worlds = {line["term"]: line["world"] for line in evidence.of("form")}
    sizes = list(worlds.values())
    assert sizes[-5:] == [3, 3, 2, 1, 2] and sizes[:-5] == sorted(sizes[:-5]), "late nodes join the first world"
    check_planted(tmp_path / "run" / "faulted", tmp_path / "damaged")


def check_planted(folder: Path, damaged: Path) -> None:
    """Plant a bug of each invariant that holds in a copy of a run without a tracker; each is caught by it.

    Not of `heads`: where a survivor of the killed worker has committed alone, a commit beside the lineage is explained.
    """
    holds = {finding.invariant for finding in judge(collect(folder)) if finding.truth == "true"} - {"tracking", "heads"}
    wrong, first = [], {planted.invariant: planted for planted in reversed(PLANTED)}
    for invariant in holds & first.keys():
        shutil.copytree(folder, damaged)
        first[invariant].plant(damaged)
        truths = {finding.invariant: finding.truth for finding in judge(collect(damaged))}
        wrong += [first[invariant].name] if truths[invariant] != first[invariant].truth else []
        shutil.rmtree(damaged)
    assert wrong == []
    assert len(holds & first.keys()) > len(first) / 2


def test_an_error_is_to_be_fixed_and_a_kill_to_be_started_again(
    tmp_path: Path, rows: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A bug, a device without memory, a killed worker, and all nodes killed: the run says which it was."""
    faults = [
        {"kind": "raise", "node": 1, "at_point": {"name": "applied", "nth": 12}},
        {"kind": "kill_worker", "node": 1, "within": [0.25, 0.3]},
        {"kind": "oom", "node": 1, "at_point": {"name": "reduce", "nth": 12}},
        {"kind": "kill_job", "within": [0.6, 0.65], "for_s": 1},
    ]
    config = {**WITNESS, **paced(WITNESS, 10, tmp_path / "never"), "epochs": 20}
    path = scenario(tmp_path, rows, config, nodes={"count": 2, **FORKED}, faults=faults)
    found = verdict_of([path, "--seed", "3", "--out", str(tmp_path / "run"), "--no-reference"], capfd)
    assert found["valid"], broken(found)
    assert answers(tmp_path / "run") == WHY["errors"]
    assert "it named the right process 3 times" in str(found["invariants"]), (
        "of a job killed whole nobody is left to say"
    )
    assert Counter(np.load(tmp_path / "run" / "faulted" / "witness.npy").tolist()) == {20: 331}


def test_a_run_without_faults_proves_nothing(tmp_path: Path, rows: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With nothing injected the verdict is not valid, though the run is healthy: the canary."""
    config = {**WITNESS, "epochs": 1, "task": {"path": "elastic_train.tasks.witness:Witness"}}
    path = scenario(tmp_path, rows, config, nodes={"count": 1, **FORKED})
    found = verdict_of([path, "--out", str(tmp_path / "run"), "--no-reference"], capfd)
    assert not found["valid"]
    invariants = found["invariants"]
    assert isinstance(invariants, list)
    assert {item["invariant"] for item in invariants if item["truth"] != "true"} == {"faults", "rpo", "rto"}


@pytest.mark.hunt
def test_survivors_continue_in_their_processes(tmp_path: Path, rows: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Live: a killed rank, a frozen one, a killed node and its return cost no applied step and no other process."""
    faults = [
        {"kind": "kill_worker", "node": 1, "within": [0.05, 0.1]},
        {"kind": "freeze_worker", "node": 1, "within": [0.15, 0.2], "for_s": 4},
        {"kind": "kill_node", "node": 1, "within": [0.25, 0.3]},
        {"kind": "start_node", "node": 1, "within": [0.3, 0.35]},  # most of the job is left for its return
    ]
    nodes = {"count": 2, "recovery": "live", **FORKED}
    until = tmp_path / "until"
    config = {**CLASSIFIER, **paced(CLASSIFIER, 40, until), "epochs": 14}
    path = scenario(tmp_path, rows, config, nodes=nodes, faults=faults)
    with once_all_are_back(tmp_path / "run", 2, until):
        found = verdict_of([path, "--seed", "3", "--out", str(tmp_path / "run")], capfd)
    assert found["valid"], broken(found)
    assert answers(tmp_path / "run") == WHY["live"]
    assert found["rpo_steps"] == 0
    assert found["weights_sha256"] == found["reference_weights_sha256"]
    evidence = collect(tmp_path / "run" / "faulted")
    hit = {pid for fault in evidence.of("fault") for pid in items(fault, "pids")}
    worlds = list(pids_of(evidence).values())
    assert worlds[0] - hit and worlds[0] - hit <= worlds[-1]
