"""Small jobs for several training tests: their configurations and results."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from elastic_train.checkpoint.commits.lookup import find
from elastic_train.checkpoint.commits.weights import CommitWeights
from elastic_train.checkpoint.format.dcp import digest_of, join_digests
from elastic_train.checkpoint.stores.open import open_store
from tests.conftest import Finished

PARAMS = {
    "max_tokens": 16,
    "dim": 16,
    "depth": 1,
    "heads": 2,
    "dropout": 0.2,
    "vocabulary": 64,
    "numeric": ["size"],
    "categorical": ["kind"],
}

CLASSIFIER: dict[str, object] = {
    "task": {"path": "elastic_train.tasks.text_classifier:TextClassifier", "params": PARAMS},
    "batch": {"global_batch": 24, "micro_batch": 6},
    "optimizer": {"lr": 0.01, "warmup_steps": 3},
    "epochs": 2,
    "validation": {"every": "10 steps"},
    "checkpoint": {"every": "7 steps", "keep_last": 3},
}

WITNESS: dict[str, object] = {
    "task": {"path": "elastic_train.tasks.witness:Witness"},
    "batch": {"global_batch": 30, "micro_batch": 6},
    "optimizer": {
        "name": "sgd",
        "lr": 1.0,
        "weight_decay": 0,
        "clip_norm": None,
        "warmup_steps": 0,
        "schedule": "constant",
    },
    "epochs": 3,
    "checkpoint": {"every": "5 steps"},
}


def config(folder: Path, rows: Path, tree: dict[str, object], **changes: object) -> str:
    """Write a configuration whose run is stored below `folder`."""
    data = {"train": str(rows / "train"), "validation": str(rows / "validation"), "too_long": "truncate"}
    whole = {"run": {"dir": str(folder / "run"), "seed": 5}, "data": data, **tree, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(whole))
    return str(path)


def failing(folder: Path, after: int, how: str = "raise") -> dict[str, object]:
    """Return the classifier's configuration with a task that fails once; raises when its first commit is there."""
    commit = folder / "run" / "commits" / "00000001-000000000007.json"
    params = {**PARAMS, "marker": str(folder / "failed"), "after": after, "how": how, "once": str(commit)}
    return {**CLASSIFIER, "task": {"path": "tests.tasks:FailsOnce", "params": params}}


def result(folder: Path) -> dict[str, object]:
    return json.loads((folder / "run" / "result.json").read_text())


def history(folder: Path, op: str) -> list[dict[str, object]]:
    lines = [line for path in (folder / "run" / "history").glob("*") for line in path.read_text().splitlines()]
    return [line for line in map(json.loads, lines) if line["op"] == op]


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of every step of a run."""
    return {int(str(line["step"])): float(str(line["loss"])) for line in history(folder, "step")}


def succeed(done: Finished) -> Finished:
    assert done.code == 0, done.output
    return done


def average_of(folder: Path) -> str:
    """Return one hash of the averaged weights of a run's newest commit."""
    store = open_store(str(folder / "run"))
    record = find(store, None)
    averaged = CommitWeights.of(store, record, "ema")
    names = list(averaged.kinds)
    return join_digests({name: digest_of(tensor) for name, tensor in zip(names, averaged.read(names), strict=True)})
