"""The configuration of a run: one tree of typed keys, each with a good default.

`elastic_train.config.sources` says where values come from. The lanes of a run are not a key: they follow from
`batch.global_batch / batch.micro_batch`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from elastic_train.best import parse_best
from elastic_train.config import yaml12
from elastic_train.errors import ConfigError

Value = object


def _folder(value: str | None) -> str | None:
    """Refuse an address where a folder is meant."""
    if value is not None and "://" in value:
        raise ValueError("is an address, not a folder; only data and commits (checkpoint.url) may be far away")
    return _home(value)


def _home(value: str | None) -> str | None:
    """Read ~ as a shell does, which does not see what is written in a file."""
    return None if value is None else os.path.expanduser(value)  # noqa: PTH111 - a Path would change the rest of it


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RunConfig(_Section):
    dir: str = "runs/default"
    """Folder that holds everything this run leaves behind; start again with the same one to resume."""
    name: str | None = None
    """Name shown in MLflow; the folder's name if not given."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """The one seed of order, initial weights, dropout and augmentation."""
    forensic: bool = False
    """Keep every step's sample ids in the history, so that `elastic-train audit --forensic` can name the wrong ones."""

    _is_folder = field_validator("dir")(_folder)


class TaskConfig(_Section):
    path: str = "elastic_train.tasks.text_classifier:TextClassifier"
    """What is trained, as module:Class; see elastic_train.tasks.Task for the six methods of your own."""
    params: dict[str, Value] = Field(default_factory=dict)
    """Keyword arguments of the task's class."""


class DataConfig(_Section):
    train: str
    """Folder or URL of the training set; it holds a manifest.json (make one with `elastic-train data`)."""
    validation: str | None = None
    """Folder or URL of the validation set; no validation if not given."""
    block_row_groups: PositiveInt = 8
    """Row groups shuffled together: more mixes better and keeps more of them in memory."""
    length_bucketing: bool = False
    """Put rows of similar length into a micro-batch, alike on all ranks; needs `elastic-train data lengths`."""
    num_workers: int = Field(default=0, ge=0)
    """Loader processes of each rank; 0 reads by threads, faster unless collating is slow."""
    unreadable: Literal["fail", "quarantine"] = "fail"
    """A row group that cannot be read: end the run, or go on without its samples, which every commit then lists."""
    too_long: Literal["fail", "truncate"] = "fail"
    """A row with more values than the task takes: end the run, or cut it there and count it."""
    cache_dir: str | None = None
    """Folder of every node for decoded row groups: a restart, another epoch, and all its ranks read them there."""
    cache_bytes: PositiveInt = 64 << 30
    """Bytes that the cache may take; the least recently used row groups are deleted first."""

    _is_folder = field_validator("cache_dir")(_folder)


class BatchConfig(_Section):
    global_batch: PositiveInt = 64
    """Samples of one optimizer step; it never changes, whatever the number of nodes."""
    micro_batch: PositiveInt = 8
    """Samples of one lane in one step; global_batch / micro_batch lanes, at least as many as ranks."""

    @model_validator(mode="after")
    def _divides(self) -> BatchConfig:
        if self.global_batch % self.micro_batch:
            below = self.global_batch - self.global_batch % self.micro_batch
            raise ValueError(
                f"global_batch {self.global_batch} is no multiple of micro_batch {self.micro_batch}; "
                f"the nearest are {below} and {below + self.micro_batch}"
            )
        return self

    @property
    def num_lanes(self) -> int:
        return self.global_batch // self.micro_batch


class OptimizerConfig(_Section):
    name: Literal["adamw", "sgd"] = "adamw"
    """Update rule."""
    lr: PositiveFloat = 1e-3
    """Learning rate at the end of the warm-up."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay (adamw) or L2 (sgd)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of adamw's two moments."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest norm of the step's whole gradient; null for no clipping."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps over which the rate rises from 0."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: down to zero along a cosine, or constant."""

    @field_validator("betas")
    @classmethod
    def _decay(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each of the two must be at least 0 and less than 1")
        return betas


class ValidationConfig(_Section):
    every_steps: PositiveInt | None = 100
    """Validate after every so many steps; null for only at the end."""
    max_samples: PositiveInt | None = None
    """Use only the first so many samples; null for all."""


class CheckpointConfig(_Section):
    url: str | None = None
    """Where commits are published, a folder or an fsspec URL; run.dir if not given."""
    near_dir: str | None = None
    """Folder on every node, such as tmpfs, for a copy of the newest commits, which is read instead if it matches."""
    every_steps: PositiveInt | None = 50
    """Commit after every so many steps; null for never by count."""
    every_s: PositiveFloat | None = 900.0
    """Commit when so many seconds have passed since the last; null for never by time."""
    interval: Literal["auto"] | None = None
    """auto: in place of every_steps and every_s, what wastes least by the saves and faults so far, within rpo_s."""
    rpo_s: PositiveFloat = 900.0
    """With interval: auto, how many seconds of training a fault may cost at most."""
    when_busy: Literal["skip", "wait"] = "skip"
    """A commit that is due while the last one is being written: skip it, or wait for the last."""
    give_up_after: PositiveInt | None = 10
    """Failed commits in a row after which training ends with an error; null for never."""
    keep_last: PositiveInt = 5
    """The newest commits are kept, so many; the newest verified one, pinned and held ones are never deleted."""
    keep_every_steps: PositiveInt | None = None
    """Also keep the first commit at or behind every multiple of so many steps."""
    keep_every_s: PositiveFloat | None = None
    """Also keep the first commit of every period of so many seconds."""
    keep_best: str | None = None
    """Also keep the commit with the best value of a validation metric: 'min loss', 'max macro_f1'."""
    storage_budget: ByteSize | None = Field(default=None, gt=0)
    """In place of keep_last, as many of the newest commits as fit into 200GB, say, beside what else is kept."""

    _is_folder = field_validator("near_dir")(_folder)
    _expands = field_validator("url")(_home)

    @field_validator("keep_best")
    @classmethod
    def _names_a_best(cls, text: str | None) -> str | None:
        if text is not None:
            try:
                parse_best(text)
            except ConfigError as error:
                raise ValueError(str(error)) from None  # pydantic collects these, with their keys
        return text


class TrackingConfig(_Section):
    mlflow_uri: str | None = None
    """MLflow's tracking URI, sqlite:///mlflow.db for a local file; null to keep only the local metrics."""
    experiment: str = "elastic-train"
    """MLflow's experiment."""


class Config(_Section):
    """A checked configuration, frozen; `elastic-train keys` lists every key with its type, default and meaning.

    `load_config` makes one from a file. `Config(data={"train": "data/rows"})` makes one from values alone, and raises
    pydantic's ValidationError, a ValueError, if they are wrong.
    """

    run: RunConfig = Field(default_factory=RunConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    data: DataConfig
    batch: BatchConfig = Field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    epochs: PositiveInt = 1
    """Passes over the training set."""
    max_steps: PositiveInt | None = None
    """Stop after so many steps, in the middle of an epoch if need be; overrides epochs."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """bf16: autocast. fp16: autocast and a gradient scaler."""
    reduction: Literal["canonical", "fast"] = "canonical"
    """canonical: the same bits at any world size. fast: all_reduce, only the rounding varies."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the node's GPUs if it has any."""
    threads_per_rank: PositiveInt = 1
    """Compute threads of each rank, equal in all worlds, since another count may round otherwise."""
    peer_timeout_s: PositiveFloat = 300.0
    """How long a collective waits for a silent peer before the world is given up."""
    hang_timeout_s: PositiveFloat | None = None
    """How long a rank may work without progress before it dumps its stacks and ends; null: learned from its steps.

    To warm up, before its first world, a process may take ten times as long; with null, ten minutes."""

    @property
    def checkpoint_url(self) -> str:
        return self.checkpoint.url or self.run.dir

    @property
    def run_name(self) -> str:
        return self.run.name or Path(self.run.dir).name

    def identity(self) -> str:
        """Return a digest of the keys that fix order and state; a run cannot be resumed with another one.

        The manifest's digest stands beside it in every commit. Other keys (a rate, a longer horizon) may change.
        """
        fixed = [self.run.seed, self.task.model_dump(mode="json"), self.batch.model_dump(), self.data.block_row_groups]
        fixed += ["length_bucketing"] if self.data.length_bucketing else []
        return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()

    def to_yaml(self) -> str:
        """Return the resolved configuration as YAML, which `load` reads back to the same values."""
        return yaml12.write(self.model_dump(mode="json"))


def keys() -> Iterator[tuple[str, str, str, str]]:
    """Yield (key, type, default, meaning) of every key, for `elastic-train keys` and for the nearest name."""
    yield from _keys_of(Config, "")


def _keys_of(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys_of(kind, f"{prefix}{name}.")
            continue
        shown = getattr(kind, "__name__", str(kind)) if isinstance(kind, type) else str(kind)
        shown = shown.replace("typing.", "").replace(", Gt(gt=0)", "").replace("Annotated[int]", "int")
        default = "required" if field.is_required() else str(field.get_default(call_default_factory=True))
        yield f"{prefix}{name}", shown, default, field.description or ""


def nearest(name: str, known: Sequence[str]) -> str:
    """Return '; did you mean ...?' for the closest known name, or an empty text if none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not close:
        tails = {known_name.rsplit(".", 1)[-1]: known_name for known_name in known}
        close = [tails[tail] for tail in difflib.get_close_matches(name.rsplit(".", 1)[-1], list(tails), n=1)]
    return f"; did you mean '{close[0]}'?" if close else ""
