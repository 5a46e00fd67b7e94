"""A small language model that every layout can train, and comparisons of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from elastic_train.checkpoint.commits.lookup import find
from elastic_train.checkpoint.commits.reader import read_state
from elastic_train.checkpoint.format.layout import leaves_by_path
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.inference.opening import open_trained
from elastic_train.tasks.decoder.model import DecoderShape
from tests.elastic_train.training.jobs import average_of, config, history, losses, result
from tests.rounding import num_terms

MODEL = {"vocabulary": 64, "dim": 16, "depth": 2, "heads": 4, "kv_heads": 2, "dropout": 0.1, "tied": False}
EXPERTS = {"hidden": 24, "experts": 4, "shared_hidden": 8}
LANGUAGE: dict[str, object] = {
    "task": {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": {"model": MODEL, "max_tokens": 16}},
    "batch": {"global_batch": 30, "micro_batch": 6},
    "optimizer": {"lr": 0.01, "warmup_steps": 3, "schedule": "constant", "clip_norm": 0.2, "ema_decay": 0.9},
    "epochs": 1,
    "validation": {"every": "2 steps", "weights": "ema"},
    "checkpoint": {"every": "2 steps", "keep_last": 3},
}
"""Five lanes per step, which only one or five cells divide evenly; the last step has one sample."""
TERMS = num_terms(DecoderShape(**{**MODEL, "depth": 4, "dropout": 0.0}), num_tokens=16, num_rows=30)  # type: ignore[arg-type]


def write(
    folder: Path, rows: Path, model: Mapping[str, object] | None = None, path: str | None = None, **keys: object
) -> str:
    """Write a job with changed model sizes, optionally with another task class."""
    task = {
        "path": path or "elastic_train.tasks.causal_lm:CausalLM",
        "params": {"model": {**MODEL, **(model or {})}, "max_tokens": 16},
    }
    return config(folder, rows, {**LANGUAGE, "task": task, **keys})


def assert_same_bits(folder: Path, other: Path) -> None:
    """Compare weights, averages, metrics and every step's loss; assert that no audit found a wrong gradient."""
    for what in ("weights_sha256", "metrics", "num_samples"):
        assert result(folder)[what] == result(other)[what]
    assert average_of(folder) == average_of(other)
    assert losses(folder) == losses(other)
    assert not [line for line in history(folder, "event") if line["kind"] == "wrong_gradient"]


def assert_near(folder: Path, other: Path) -> None:
    """Compare the newest commits' weights up to rounding."""
    mine, theirs = newest_weights(folder), newest_weights(other)
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=2e-5)


def newest_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of the newest commit, and assert that torch's reader and a single process find the same."""
    store = open_store(str(folder / "run"))
    record = find(store, None)
    state = read_state(store, record)
    weights: dict[str, Tensor] = state["model"]  # type: ignore[assignment]
    stock = {"model": {name: torch.empty_like(tensor) for name, tensor in weights.items()}}
    dcp.load(stock, storage_reader=dcp.FileSystemReader(folder / "run" / record.attempt))
    opened = open_trained(str(folder / "run")).model.state_dict()
    for found in (stock["model"], opened):
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    return weights


def assert_stock_reader_finds_all(folder: Path) -> None:
    """Assert that torch's reader and this package's find the same in the newest commit, moments included."""
    store = open_store(str(folder / "run"))
    record = find(store, None)
    state = read_state(store, record)
    tensors = {path: leaf for path, leaf in leaves_by_path(state).items() if isinstance(leaf, Tensor)}
    kinds = {str(path[3]) for path in tensors if path[:2] == ("optimizer", "state")}
    assert {"exp_avg", "exp_avg_sq", "ema"} <= kinds or {"row_var", "col_var", "variance", "ema"} <= kinds
    emptied = _like({kind: state[kind] for kind in ("model", "optimizer")})
    dcp.load(emptied, storage_reader=dcp.FileSystemReader(folder / "run" / record.attempt))
    found = leaves_by_path(emptied)
    assert all(torch.equal(found[path], leaf) for path, leaf in tensors.items())  # type: ignore[arg-type]


def _like(tree: Mapping[str, object]) -> dict[str, object]:
    """Return a nested state with new tensors of the same shapes, without plain values."""
    found: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, Tensor):
            found[key] = torch.empty_like(value)
        elif isinstance(value, Mapping):
            found[key] = _like(value)
    return found


def file_of(folder: Path, name: str) -> str:
    """Return the file of the newest commit that holds a tensor, which must not be spread over several files."""
    record = find(open_store(str(folder / "run")), None)
    metadata = dcp.FileSystemReader(folder / "run" / record.attempt).read_metadata()
    [found] = {place.relative_path for index, place in metadata.storage_data.items() if index.fqn == name}
    return str(found)


def bytes_of(folder: Path, part: str) -> dict[int, int]:
    """Return the memory of a category after a run's last steps, by rank."""
    lines = sorted(history(folder, "memory"), key=lambda line: int(str(line["step"])))
    return {int(str(line["rank"])): line["parts"][part] for line in lines}  # type: ignore[index]
