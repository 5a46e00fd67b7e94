"""The commit record: the one small file that makes a checkpoint exist, with its metadata.

It is canonical JSON with a seal, the SHA-256 of the rest, so a flipped bit anywhere is detected before a value is used.
A child names its parent by the record's digest, the SHA-256 of its bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from pydantic import TypeAdapter, ValidationError

from elastic_train.checkpoint.stores.store import FileRecord
from elastic_train.config.recipe import EarlyStoppingConfig, parse_best
from elastic_train.core.accounting import CoverageSums, SampleAccount
from elastic_train.core.arrays import Ranges
from elastic_train.core.lineage import Interval, commit_key
from elastic_train.core.mixture import SourceFacts
from elastic_train.core.order import Cursor
from elastic_train.errors import CommitError
from elastic_train.system.extras import version_of


@dataclass(frozen=True, slots=True)
class Improvement:
    """The best value of a metric (None if there was no finite one) and its step.

    `metric` is written 'min loss'. `validated_at` is the step of the last validation, `num_since` the number of
    consecutive validations without improvement.

    Track validation results: the best value, and the number of validations since. Stored in commits, as early
    stopping and the best commit depend on it.
    """

    metric: str
    best: float | None = None
    best_step: int = 0
    validated_at: int = 0
    num_since: int = 0

    def after(self, step: int, value: float | None, min_delta: float) -> Improvement:
        """Return the state after a validation at a step; repeated validations of a step count once.

        A validation without a value (None), as without targets, is neither an improvement nor a failure.
        """
        if step <= self.validated_at:
            return self
        if value is None:
            return replace(self, validated_at=step)
        if math.isfinite(value) and self._is_better(value, min_delta):
            return replace(self, best=value, best_step=step, validated_at=step, num_since=0)
        return replace(self, validated_at=step, num_since=self.num_since + 1)

    def _is_better(self, value: float, min_delta: float) -> bool:
        _, is_higher_better = parse_best(self.metric)
        gain = 0.0 if self.best is None else value - self.best if is_higher_better else self.best - value
        return self.best is None or (gain > 0.0 and gain >= min_delta)


def improvement_for(config: EarlyStoppingConfig | None, known: Improvement | None) -> Improvement | None:
    """Return the known comparison of validations if its metric matches, else a new one; None if none are compared."""
    if config is None:
        return None
    return known if known is not None and known.metric == config.metric else Improvement(config.metric)


def is_exhausted(config: EarlyStoppingConfig | None, known: Improvement | None) -> bool:
    """Return True if enough consecutive validations brought no improvement to end training."""
    found = improvement_for(config, known)
    return config is not None and found is not None and found.num_since >= config.patience


FORMAT = 4
_FORMATS = (3, FORMAT)
"""Readable formats. In 3, tensors have no cuts in the weights' hash."""

VOID = b'{"void":true}\n'
"""Tombstone: prevents a record under its key; recognised in listings by its size, which is below any record's."""


@dataclass(frozen=True, kw_only=True)
class CommitFacts:
    """Facts that the trainer records about a saved state.

    * `step`: applied optimizer steps; `cursor`: applied samples of the current epoch, on every lane;
    * `coverage`: sums over the ids of all samples applied so far, which prove that each counted once;
    * `rng`: the seed and the policy of random numbers;
    * `metrics`: by name; non-finite values are stored as null (None);
    * `config_digest`, `manifest_digest`: of the configuration's identity and of the dataset's manifest;
    * `world_size`: ranks at the time of the save; may differ when the commit is loaded.

    `account` and `order` allow checking the coverage sums without the run: `order` has the parameters of the sample
    order (version, num_samples, num_lanes, micro_batch, block_row_groups; lengths: their fingerprint, or 0). Older
    commits have neither, or no version.

    `fast_steps` and `skipped_steps` are half-open ranges of earlier steps, counted from 0: those whose rounding
    depended on the world, and those without an update because loss or gradient was not finite. `improvement` is the
    state of early stopping, if enabled. `sources` are those of a mixture, with the sums applied of each; None for a
    single training set. `cut_dims` are the dimensions along which tensors can be split over ranks, by name: they
    determine the grains of the weights' hash.
    """

    step: int
    cursor: Cursor
    coverage: CoverageSums
    rng: Mapping[str, str | int]
    metrics: Mapping[str, float | None]
    config_digest: str
    manifest_digest: str
    world_size: int
    account: SampleAccount | None = None
    order: Mapping[str, int] | None = None
    fast_steps: Ranges | None = None
    skipped_steps: Ranges | None = None
    sources: tuple[SourceFacts, ...] | None = None
    improvement: Improvement | None = None
    cut_dims: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        finite = {
            name: value if value is not None and math.isfinite(value) else None for name, value in self.metrics.items()
        }
        object.__setattr__(self, "metrics", finite)


@dataclass(frozen=True, kw_only=True)
class CommitRecord(CommitFacts):
    """A published checkpoint: its files, the state they hold, and its parent.

    * `weights_sha256`: one hash over all weights and buffers, equal if and only if they are bit-identical, for commits
      of one format;
    * `term`: number of the world that published it; commits are ordered by (term, step);
    * `parent`, `parent_key`: digest and key of the parent, None for the first;
    * `intervals`: tile the steps [0, step) by the terms that applied them; they outlive deleted ancestors;
    * `attempt`: folder of its files in the store; `files`: sizes and checksums by name below it;
    * `int_keyed`, `empty`: paths of mappings that the file format would change: with integer keys, and without entries;
    * `versions`: of this package and of libraries, and digests of the task's modules and of the validation set;
    * `created_at`: unix seconds, by the publishing machine's clock.
    """

    weights_sha256: str
    term: int
    parent: str | None
    parent_key: str | None
    intervals: tuple[Interval, ...]
    attempt: str
    int_keyed: tuple[tuple[str | int, ...], ...]
    empty: tuple[tuple[str | int, ...], ...]
    versions: Mapping[str, str]
    created_at: float
    files: Mapping[str, FileRecord]
    format: int = FORMAT

    @property
    def key(self) -> str:
        return commit_key(self.term, self.step)

    @property
    def is_by_grains(self) -> bool:
        """True if gradient norm and weights hash are computed as they are now."""
        return self.format >= 4

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the record's bytes, in hexadecimal."""
        return hashlib.sha256(self.encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def encode(self) -> bytes:
        """Return the record's bytes; equal records give equal bytes."""
        return self._content

    @cached_property
    def _content(self) -> bytes:
        fields = _ADAPTER.dump_python(self, mode="json", by_alias=True)
        for name in _SINCE_THEN:
            if fields[name] is None:
                del fields[name]
        return _dump({**fields, "seal": hashlib.sha256(_dump(fields)).hexdigest()})


_ADAPTER = TypeAdapter(CommitRecord)
_SINCE_THEN = ("account", "order", "fast_steps", "skipped_steps", "sources", "improvement", "cut_dims")
"""Fields that older records lack; they are None then."""


def decode(content: bytes, key: str) -> CommitRecord:
    """Decode a record's bytes; raise CommitError if they are damaged, of another format, or under a wrong key."""
    try:
        fields = json.loads(content)
        if not isinstance(fields, dict):
            raise CommitError(f"{key} is not a commit record")
        if (found := fields.get("format")) not in _FORMATS:
            reads = f"this version reads 3 and {FORMAT}; use the one that wrote it"
            raise CommitError(f"{key} has format {found}, but {reads}")
        seal = fields.pop("seal", None)
        if seal != hashlib.sha256(_dump(fields)).hexdigest():
            raise CommitError(f"{key} does not match its seal; the record was damaged")
        record = _ADAPTER.validate_python(fields)
    except (ValueError, ValidationError, RecursionError) as error:
        raise CommitError(f"{key} cannot be read as a commit record: {str(error).splitlines()[0]}") from error
    if record.encode() != content:
        raise CommitError(f"{key} is not in canonical form; the record was damaged")
    if record.key != key:
        raise CommitError(f"{key} holds the record of {record.key}")
    return record


def library_versions() -> dict[str, str]:
    ours = version_of("elastic-train") or "unknown"
    return {"elastic-train": ours, "python": platform.python_version(), "torch": version_of("torch") or "unknown"}


def _dump(fields: object) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
