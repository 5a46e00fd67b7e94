"""The commit record: the one small file that makes a checkpoint exist, and everything known about it.

Its bytes are canonical JSON that ends in a seal, the SHA-256 of the rest, so a flipped bit anywhere is seen before a
value is used. The record's digest, the SHA-256 of its bytes, is what a child names as its parent.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import TypeAdapter, ValidationError

from elastic_train.checkpoint.stores.checksums import FileRecord
from elastic_train.core.accounting import Account
from elastic_train.core.coverage import CoverageSums
from elastic_train.core.lineage import Interval, commit_key
from elastic_train.core.order import Cursor
from elastic_train.errors import CommitError

FORMAT = 2
_FORMATS = (1, FORMAT)  # in format 1 files have SHA-256 in place of BLAKE3

VOID = b'{"void":true}\n'
"""What is no record, and keeps one from being created under its key: far shorter than any, so a listing tells it."""

Path = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class CommitFacts:
    """What the trainer says about the state that it saves; a metric that is not finite is kept as null.

    `account` and `order` let anyone check the coverage sums without the run: `order` has the numbers that the order of
    samples follows from (version, num_samples, num_lanes, micro_batch, block_row_groups; lengths: their fingerprint, or
    0). Older commits have neither, or no version.
    """

    step: int
    cursor: Cursor
    coverage: CoverageSums
    rng: Mapping[str, str | int]
    metrics: Mapping[str, float | None]
    config_digest: str
    manifest_digest: str
    world_size: int
    account: Account | None = None
    order: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        finite = {
            name: value if value is not None and math.isfinite(value) else None for name, value in self.metrics.items()
        }
        object.__setattr__(self, "metrics", finite)


@dataclass(frozen=True, kw_only=True)
class CommitRecord(CommitFacts):
    """A published checkpoint: where its files are, what state they hold, and which commit it continues.

    `parent` is the digest of the commit that this one continues, `parent_key` its key. `intervals` tile [0, step) by
    the terms that applied the steps; they outlive the ancestors that retention deletes. `attempt` is the folder of
    the files, named below it. `int_keyed` and `empty` name the mappings of the state that the file format would
    change: those with integer keys, and those with no entry.
    """

    weights_sha256: str
    term: int
    parent: str | None
    parent_key: str | None
    intervals: tuple[Interval, ...]
    attempt: str
    int_keyed: tuple[Path, ...]
    empty: tuple[Path, ...]
    versions: Mapping[str, str]
    created_at: float
    files: Mapping[str, FileRecord]
    format: int = FORMAT

    @property
    def key(self) -> str:
        return commit_key(self.term, self.step)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def encode(self) -> bytes:
        """Return the record's bytes; equal records give equal bytes."""
        fields = _ADAPTER.dump_python(self, mode="json")
        for name in _SINCE_THEN:
            if fields[name] is None:
                del fields[name]
        for file in fields["files"].values():
            del file["sha256" if file["sha256"] is None else "blake3"]
        return _dump({**fields, "seal": hashlib.sha256(_dump(fields)).hexdigest()})


_ADAPTER = TypeAdapter(CommitRecord)
_SINCE_THEN = ("account", "order")
"""Fields that records did not always have; their absence is None."""


def decode(content: bytes, key: str) -> CommitRecord:
    """Read a record's bytes; raise CommitError if they are damaged, of another format, or under a wrong key."""
    try:
        fields = json.loads(content)
        if not isinstance(fields, dict):
            raise CommitError(f"{key} is no commit record")
        if fields.get("format") not in _FORMATS:
            raise CommitError(f"{key} has format {fields.get('format')}, this version reads up to {FORMAT}")
        seal = fields.pop("seal", None)
        if seal != hashlib.sha256(_dump(fields)).hexdigest():
            raise CommitError(f"{key} does not match its seal; the record was damaged")
        record = _ADAPTER.validate_python(fields)
    except (ValueError, ValidationError, RecursionError) as error:
        raise CommitError(f"{key} cannot be read as a commit record: {str(error).splitlines()[0]}") from error
    if record.encode() != content:
        raise CommitError(f"{key} is not written as records are; it was damaged")
    if record.key != key:
        raise CommitError(f"{key} holds the record of {record.key}")
    return record


def library_versions() -> dict[str, str]:
    """Return the versions that may matter to a reader of the files."""
    return {"python": platform.python_version(), "torch": torch.__version__}


def _dump(fields: object) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
