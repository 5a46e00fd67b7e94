"""Read the weights of a verified commit one by one, without the rest of its state, such as moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Self

from torch import Tensor

from elastic_train.checkpoint.commits.pins_and_holds import holding
from elastic_train.checkpoint.commits.reader import verify
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.format.layout import AVERAGE, MODEL
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.checkpoint.format.stored_tensors import Kind, ReadTensors, StoredTensors
from elastic_train.checkpoint.format.weights_digest import digest_of
from elastic_train.checkpoint.stores.store import Store
from elastic_train.errors import CommitError, ConfigError
from elastic_train.system.progress_bar import Track

Weights = Literal["trained", "ema"]
"""Weights as trained, or their average over the steps."""
_BATCH_BYTES = 8 << 20
"""Tensors below this size are read together, so that neighbours in a file need one request."""


@dataclass(frozen=True, slots=True)
class CommitWeights:
    """A commit's weights and buffers by name, in the model's order."""

    _stored: StoredTensors
    _paths: Mapping[str, StatePath]

    @classmethod
    def of(cls, store: Store, record: CommitRecord, weights: Weights = "trained") -> Self:
        """Find the weights as trained, or their averages where they exist; raise CommitError if there are none.

        Raise ConfigError if averages are requested and the commit has none.
        """
        source = store.near({f"{record.attempt}/{name}": file for name, file in record.files.items()})
        stored = StoredTensors(source, record.attempt, record.files)
        paths = {str(path[1]): path for path in stored.kinds if path[0] == MODEL and len(path) == 2}
        if not paths:
            raise CommitError(f"{record.key} holds no '{MODEL}'")
        return cls(stored, paths if weights == "trained" else _averaged(stored, paths, record.key))

    @property
    def kinds(self) -> dict[str, Kind]:
        return {name: self._stored.kinds[path] for name, path in self._paths.items()}

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return some of the weights under other names; `names` maps new names to old ones, in order."""
        return type(self)(self._stored, {new: self._paths[old] for old, new in names.items()})

    def read(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield tensors in this order, on the CPU, reading ahead some megabytes at most.

        Raise CommitError if bytes do not match their checksums, StorageError if the store cannot be read.
        """
        kinds, batch, num_bytes = self.kinds, list[str](), 0
        for name in names:
            if batch and num_bytes + kinds[name].num_bytes > _BATCH_BYTES:
                yield from self._read(batch)
                batch, num_bytes = [], 0
            batch.append(name)
            num_bytes += kinds[name].num_bytes
        yield from self._read(batch)

    def tracked(self, track: Track, what: str) -> ReadTensors:
        return lambda names: iter(track(self.read(names), what, len(names), "tensors"))

    def _read(self, names: Sequence[str]) -> Iterator[Tensor]:
        tensors = self._stored.read([self._paths[name] for name in names])
        while tensors:
            yield tensors.pop(0)


@contextmanager
def open_weights(store: Store, record: CommitRecord, weights: Weights = "trained") -> Iterator[CommitWeights]:
    """Verify all files of a commit, and protect it from retention while its weights are read."""
    with holding(store, record.key):
        verify(store, record)
        yield CommitWeights.of(store, record, weights)


def _averaged(stored: StoredTensors, paths: Mapping[str, StatePath], key: str) -> dict[str, StatePath]:
    """Return the paths of the averages, and of weights without one.

    The average of a tied parameter is stored under its first name; other names are matched by equal bits.
    """
    averages = {str(path[2]): path for path in stored.kinds if path[:2] == ("optimizer", "state") and _is_average(path)}
    if not averages:
        raise ConfigError(f"{key} holds no average of the weights: the run has no optimizer.ema_decay")
    digests: dict[StatePath, str] = {}

    def digest(path: StatePath) -> str:
        if path not in digests:
            digests[path] = digest_of(stored.read([path])[0])
        return digests[path]

    def find(path: StatePath) -> StatePath:
        alike = [name for name in averages if name in paths and stored.kinds[paths[name]] == stored.kinds[path]]
        same = [averages[name] for name in alike if digest(paths[name]) == digest(path)]
        return same[-1] if same else path

    return {name: averages.get(name) or find(path) for name, path in paths.items()}


def _is_average(path: StatePath) -> bool:
    return len(path) == 4 and path[3] == AVERAGE
