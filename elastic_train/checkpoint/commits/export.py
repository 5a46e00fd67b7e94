"""Exporting a commit: the weights alone, as safetensors or a plain torch state dict, for use without this package."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from elastic_train.checkpoint.commits.reader import read_state, verify
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.format.layout import AVERAGE
from elastic_train.checkpoint.format.weights_digest import digest_of
from elastic_train.checkpoint.stores.store import Store
from elastic_train.errors import CommitError, ConfigError, StorageError

Format = Literal["safetensors", "torch"]
Weights = Literal["trained", "ema"]
"""Weights as they were trained, or their average over the steps."""


def export(store: Store, record: CommitRecord, target: Path, kind: Format, weights: Weights = "trained") -> int:
    """Verify a commit and write its model's tensors to a new file; return how many there are.

    Raises ConfigError if its averages are asked for and it has none.
    """
    verify(store, record)
    tensors = weights_in(read_state(store, record), record.key, weights)
    if target.exists():
        raise ConfigError(f"{target}: exists already; name another file")
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        if kind == "torch":
            torch.save(tensors, unfinished)
        else:
            _save_safetensors(tensors, unfinished, record, weights)
        unfinished.rename(target)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for a full disk
        reason = error.strerror if isinstance(error, OSError) else None
        raise StorageError(f"{target}: cannot write: {reason or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return len(tensors)


def weights_in(state: Mapping[str, Any], key: str, weights: Weights) -> dict[str, Tensor]:
    """Return a commit's weights and buffers by name: as trained, or with averages in place of what was trained.

    A tied parameter has its average under its first name; it is known under the others by its bits.
    """
    model = state.get("model")
    if not isinstance(model, dict):
        raise CommitError(f"{key} holds no 'model'")
    tensors = {str(name): value for name, value in model.items() if isinstance(value, Tensor)}
    if weights == "trained":
        return tensors
    kept = state.get("optimizer", {}).get("state", {})
    averages = {name: values[AVERAGE] for name, values in kept.items() if AVERAGE in values}
    if not averages:
        raise ConfigError(f"{key} holds no average of the weights: the run has no optimizer.ema")
    trained = {digest_of(tensors[name]): average for name, average in averages.items() if name in tensors}
    return {name: averages.get(name, trained.get(digest_of(tensor), tensor)) for name, tensor in tensors.items()}


def _save_safetensors(tensors: dict[str, Tensor], target: Path, record: CommitRecord, weights: Weights) -> None:
    origin = {"commit": record.key, "digest": record.digest}
    origin |= {"weights": "ema"} if weights == "ema" else {"weights_sha256": record.weights_sha256}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target, metadata=origin)
