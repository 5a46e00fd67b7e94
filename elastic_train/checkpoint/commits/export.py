"""Exporting a commit: the weights alone, as safetensors or a plain torch state dict, for use without this package."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from elastic_train.checkpoint.commits.reader import read_state, verify
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.stores.store import Store
from elastic_train.errors import CommitError, ConfigError, StorageError

Format = Literal["safetensors", "torch"]


def export(store: Store, record: CommitRecord, target: Path, kind: Format) -> int:
    """Verify a commit and write its model's tensors to a new file; return how many there are."""
    verify(store, record)
    model = read_state(store, record).get("model")
    if not isinstance(model, dict):
        raise CommitError(f"{record.key} holds no 'model'")
    tensors = {str(name): value for name, value in model.items() if isinstance(value, Tensor)}
    if target.exists():
        raise ConfigError(f"{target}: exists already; name another file")
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        if kind == "torch":
            torch.save(tensors, unfinished)
        else:
            _save_safetensors(tensors, unfinished, record)
        unfinished.rename(target)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for a full disk
        reason = error.strerror if isinstance(error, OSError) else None
        raise StorageError(f"{target}: cannot write: {reason or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return len(tensors)


def _save_safetensors(tensors: dict[str, Tensor], target: Path, record: CommitRecord) -> None:
    origin = {"commit": record.key, "digest": record.digest, "weights_sha256": record.weights_sha256}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target, metadata=origin)
