"""Export a commit's weights as safetensors or a plain torch state dict, for use without this package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.weights import Weights, open_weights
from elastic_train.checkpoint.format.safetensors_file import write_safetensors
from elastic_train.checkpoint.format.torch_file import write_torch
from elastic_train.checkpoint.stores.store import Store
from elastic_train.errors import ConfigError, StorageError
from elastic_train.system.atomic_files import draft_of, publish
from elastic_train.system.progress_bar import Track, silent

Format = Literal["safetensors", "torch"]


def export(
    store: Store,
    record: CommitRecord,
    target: Path,
    kind: Format,
    weights: Weights = "trained",
    track: Track = silent,
) -> int:
    """Verify a commit and stream its model's tensors to a new file; return their number.

    Raise ConfigError if averages are requested and the commit has none.
    """
    if target.exists():
        raise ConfigError(f"{target}: exists already; name another file")
    unfinished = draft_of(target)
    try:
        with open_weights(store, record, weights) as found, unfinished.open("wb") as file:
            read = found.tracked(track, f"writing {target.name}")
            if kind == "torch":
                write_torch(file, found.kinds, read)
            else:
                write_safetensors(file, found.kinds, read, _origin(record, weights))
        publish(unfinished, target)
    except OSError as error:
        raise StorageError(f"{target}: cannot write: {error.strerror or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return len(found.kinds)


def _origin(record: CommitRecord, weights: Weights) -> dict[str, str]:
    """Return the metadata of a safetensors file."""
    found = {"commit": record.key, "digest": record.digest, "cut_dims": json.dumps(record.cut_dims or {})}
    return found | ({"weights": "ema"} if weights == "ema" else {"weights_sha256": record.weights_sha256})
