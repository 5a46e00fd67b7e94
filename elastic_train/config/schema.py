"""The configuration of a run: one tree of typed keys, each with a good default.

`elastic_train.config.sources` reads the values. The number of lanes is not a key: it is
`batch.global_batch / batch.micro_batch`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    field_validator,
    model_validator,
)

from elastic_train.config import credentials, yaml12
from elastic_train.config.checkpoints import CheckpointConfig
from elastic_train.config.combinations import Feature, Found, refusals
from elastic_train.config.datasets import DataConfig, names_of
from elastic_train.config.monitoring import MonitoringConfig, ProfileConfig, TrackingConfig
from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.recipe import OptimizerConfig, ValidationConfig
from elastic_train.config.section import (
    MOST_CHARS_OF_A_NAME,
    Forms,
    Old,
    Section,
    Value,
    checked_name,
    folder,
    has_unit,
    keys_of,
    periods_of,
    whole,
    written,
)
from elastic_train.errors import ConfigError
from elastic_train.system.file_systems import STARTED_IN, absolute, working_folder
from elastic_train.system.wording import counted

Change = tuple[object, object]
"""The old and the new value of a key."""
IDENTITY = ("run.seed", "task", "batch", "data.block_row_groups", "data.length_bucketing", "data.mixture")
"""Keys and sections that `Config.identity` is made of."""


LEAST_MB_PER_S = 0.1
"""Bandwidth of a node's best link, below which `run.health_check: true` rejects the node."""


def _health_check(old: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the check of a section that has a key for the bandwidth of links."""
    return {"health_check": old.get("health_check", True) and (old["min_link_mb_per_s"] or 0.0)}


class RunConfig(Section):
    dir: str = "runs/default"
    """Local folder for everything the run writes. Start again with the same folder to resume."""
    name: str | None = None
    """Name shown in MLflow. Default: the folder's name."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Seed of the sample order, initial weights, dropout and augmentation."""
    forensic: bool = False
    """Record the sample ids of every step, so that `elastic-train audit --forensic` can name wrong ones."""
    audit_lanes: PositiveInt | None = None
    """Recompute one lane in N on another replica, to find devices that compute wrongly. Both gradients must be
    equal bit for bit, or the step is repeated. null: no audits, at no cost."""
    health_check: bool | NonNegativeFloat = True
    """Test each worker's machine before it joins a live job: matrix products, memory, disk, clock and links, within
    ten seconds (longer for a link that seems slow). A machine that corrupts bits is rejected with exit code 71; so is
    a node whose best link has less than 0.1 MB/s, or less than the number that is given (0: only report it)."""
    OLD: ClassVar[Mapping[str, Old]] = {
        "history_bytes": Old(int, 256 << 20, "is ignored: a process's history of a term has at most 256 MiB"),
        "min_link_mb_per_s": Old(float | None, 0.1, "is now health_check: N", _health_check),
        "history_terms": Old(int | None, 100, "is ignored: the histories of 100 terms are kept"),
    }

    _is_folder = field_validator("dir")(folder)

    @property
    def checks_health(self) -> bool:
        """True if each worker's machine is tested before it joins a live job."""
        return self.health_check is not False

    @property
    def min_link_mb_per_s(self) -> float:
        """Minimum bandwidth of a node's best link, in MB/s and in both directions."""
        return LEAST_MB_PER_S if isinstance(self.health_check, bool) else self.health_check

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        return checked_name(name, MOST_CHARS_OF_A_NAME)


class TaskConfig(Section):
    path: str = "elastic_train.tasks.text_classifier:TextClassifier"
    """The task to train, as module:Class. Your own task implements elastic_train.tasks.task.Task."""
    params: dict[str, Value] = Field(default_factory=dict)
    """Keyword arguments of the task's class."""


class BatchConfig(Section):
    global_batch: PositiveInt = 64
    """Samples per optimizer step, whatever the number of nodes."""
    micro_batch: PositiveInt = 8
    """Samples per lane and step. global_batch / micro_batch is the number of lanes, and the largest number of
    ranks."""

    @model_validator(mode="after")
    def _divides(self) -> BatchConfig:
        if self.global_batch % self.micro_batch:
            below = max(self.micro_batch, self.global_batch - self.global_batch % self.micro_batch)
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of micro_batch {self.micro_batch}; "
                f"the nearest are {below} and {below + self.micro_batch}"
            )
        return self

    @property
    def num_lanes(self) -> int:
        return self.global_batch // self.micro_batch


_GIVE_UP_AFTER = "20 worlds, 30 min"
_PATIENCE = Forms(("worlds", "s"), "write '20 worlds', '20 worlds, 30 min' (s, min, h or day), or null (never)")


def _give_up_after(old: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the patience of a configuration that has a key for worlds, and one for seconds."""
    today = periods_of(old.get("give_up_after", _GIVE_UP_AFTER), _PATIENCE)
    worlds = old.get("give_up_after_worlds", today.get("worlds"))
    seconds = old.get("give_up_after_s", today.get("s"))
    return {"give_up_after": None if worlds is None else written(worlds=worlds, s=seconds)}


class Config(Section):
    """A checked configuration, frozen; `elastic-train keys` lists every key with its type, default and meaning.

    `load_config` makes one from a file. `Config(data={"train": "data/rows"})` makes one from values alone, and raises
    pydantic's ValidationError, a ValueError, if they are wrong.
    """

    _as_written: Config | None = PrivateAttr(default=None)
    _started_in: str | None = PrivateAttr(default=None)
    run: RunConfig = Field(default_factory=RunConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    data: DataConfig
    batch: BatchConfig = Field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    monitoring: MonitoringConfig = Field(default_factory=MonitoringConfig)
    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    epochs: PositiveInt = 1
    """Passes over the training set. With data.mixture: passes over each source, until the slowest has finished."""
    max_steps: PositiveInt | None = None
    """Stop after this many steps, even in the middle of an epoch. Overrides epochs."""
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """bf16: autocast. fp16: autocast with a gradient scaler. fp8: bf16, but blocks' linear layers compute in float8."""
    compile: Literal[True, False, "auto"] = "auto"
    """Compile the model's blocks with torch.compile for the shape of the run's first micro-batch; other shapes run
    uncompiled. Needs a C++ compiler on CPUs, Triton on GPUs. The bits are the same in every world, but differ from
    those of false. auto: true for models and GPUs on which it was measured to help, otherwise false."""
    reduction: Literal["canonical", "fast"] = "canonical"
    """canonical: the same bits at any world size. fast: all_reduce, whose rounding depends on the world size."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the node's GPUs if it has any, otherwise the CPU."""
    threads_per_rank: int = Field(default=1, ge=1, le=4096)
    """Compute threads of each rank, the same in all worlds: another number may round differently."""
    peer_timeout_s: float = Field(default=300.0, gt=0, le=1e9)
    """Abandon the world when a collective has waited this many seconds for a silent peer."""
    give_up_after: str | None = _GIVE_UP_AFTER
    """End with exit code 93 after this many worlds in a row without a step; worlds that do not form, or that their
    processes outlive, end the job only after this time as well. Ten or more commits that fail in a row over this time
    end it with exit code 1. null: never."""
    hang_timeout_s: PositiveFloat | None = None
    """Dump stacks and exit when a rank has made no progress for this many seconds. null: learn the limit from the
    rank's steps. The warm-up before the first world may take ten times as long (null: ten minutes); before it, a rank
    may be idle for ten times as long, at least ten minutes (null: half an hour)."""

    OLD: ClassVar[Mapping[str, Old]] = {
        "give_up_after_worlds": Old(int | None, 20, "is now give_up_after: 'N worlds'", _give_up_after),
        "give_up_after_s": Old(float, 1800.0, "is now give_up_after: 'N worlds, N s'", _give_up_after),
    }

    @field_validator("give_up_after", mode="before")
    @classmethod
    def _has_units(cls, text: object) -> object:
        return has_unit(text, _PATIENCE)

    @field_validator("give_up_after")
    @classmethod
    def _counts_worlds(cls, text: str | None) -> str | None:
        if text is not None and "worlds" not in periods_of(text, _PATIENCE):
            raise ValueError(f"has no number of worlds: {_PATIENCE.advice}")
        return text

    @property
    def give_up_after_worlds(self) -> int | None:
        """Number of worlds in a row without a step that end the job; None for none."""
        return whole(periods_of(self.give_up_after, _PATIENCE).get("worlds"))

    @property
    def give_up_after_s(self) -> float:
        """Seconds for which commits that fail, and worlds that do not form or end at once, are tried at least."""
        return periods_of(self.give_up_after, _PATIENCE).get("s", 1800.0)

    @property
    def compute_type(self) -> str:
        """torch's name of the type in which autocast computes; float32 if there is none."""
        return {"fp32": "float32", "fp16": "float16"}.get(self.precision, "bfloat16")

    @property
    def features(self) -> Mapping[Feature, str]:
        """The features that are set, and how: by key and value."""
        own: Mapping[Feature, str | None] = {
            "compile": "compile: true" if self.compile is True else None,
            "fp8": "precision: fp8" if self.precision == "fp8" else None,
            "reduction: fast": "reduction: fast" if self.reduction == "fast" else None,
            "audit_lanes": None if self.run.audit_lanes is None else f"run.audit_lanes: {self.run.audit_lanes}",
        }
        return {**self.parallel.features, **{feature: text for feature, text in own.items() if text is not None}}

    def found(self) -> Iterator[Found]:
        yield from self.parallel.found()
        batch, num_lanes = self.batch, self.batch.num_lanes
        sizes = f"(batch.global_batch {batch.global_batch} / batch.micro_batch {batch.micro_batch})"
        if self.device == "cpu":
            yield Found("`device: cpu`", "device: cpu")
        if self.parallel.pipeline > (of_each := num_lanes // self.parallel.expert):
            dealt = f" for each of {self.parallel.expert} expert ranks" if self.parallel.expert > 1 else ""
            yield Found("fewer lanes than stages", f"{counted(of_each, 'lane')}{dealt} {sizes}")
        if self.parallel.expert > num_lanes:
            yield Found("fewer lanes than expert ranks", f"{counted(num_lanes, 'lane')} {sizes}")

    @model_validator(mode="after")
    def _features_work_together(self) -> Config:
        if wrong := refusals(self.features, self.found()):
            raise ValueError("; ".join(wrong))
        return self

    @model_validator(mode="after")
    def _keeps_no_passwords(self) -> Config:
        for key, url in credentials.misplaced(self.model_dump(mode="json")):
            raise ValueError(
                f"{key} is {credentials.without_password(url)} with a password, which would be written wherever the "
                "configuration is: leave it out, and give it to what reads the address, such as fsspec's variables "
                "(FSSPEC_SFTP_PASSWORD) or AWS_SECRET_ACCESS_KEY"
            )
        return self

    @model_validator(mode="after")
    def _validates_what_there_is(self) -> Config:
        if self.validation.weights == "ema" and self.optimizer.ema_decay is None:
            raise ValueError("validation.weights: ema needs an average: set optimizer.ema_decay, such as 0.999")
        keys = self.validation
        if keys.early_stopping is not None and keys.every is None:
            raise ValueError("validation.early_stopping needs validations to judge by: set validation.every")
        if keys.every_epochs is not None and self.data.mixture:
            raise ValueError(
                f"validation.every: the sources of data.mixture end their epochs at different steps: write a number of "
                f"steps, not '{keys.every}'"
            )
        return self

    def anchored(self, absolute: Callable[[str | None], str | None] = absolute) -> Config:
        """Return the configuration with absolute paths: code of a task may change the working folder at any time.

        What is recorded and compared stays as it is written, so that a run can be moved (`as_written`); a comment of
        `to_yaml` says where relative paths are from. `absolute` finds the paths of a run that was started elsewhere.
        """
        data, params = self.data, dict(self.task.params)
        for name, key in (("hf", "path"), ("adapter", "tokenizer_name_or_path")):
            if isinstance(given := params.get(name), Mapping) and isinstance(given.get(key), str):
                params[name] = {**given, key: absolute(given[key])}
        names = names_of(data.mixture) if data.mixture else ()
        parts = {
            "run": {"dir": absolute(self.run.dir)},
            "task": {"params": params},
            "data": {
                "train": absolute(data.train),
                "validation": absolute(data.validation),
                "cache_dir": absolute(data.cache_dir),
                "mixture": tuple(
                    each.model_copy(update={"source": absolute(each.source), "name": name})
                    for each, name in zip(data.mixture or (), names, strict=True)
                )
                or None,
            },
            "checkpoint": {"url": absolute(self.checkpoint.url), "near_dir": absolute(self.checkpoint.near_dir)},
            "tracking": {"mlflow_uri": _absolute_tracker(self.tracking.mlflow_uri)},
        }
        found = self.model_copy(
            update={name: getattr(self, name).model_copy(update=changed) for name, changed in parts.items()}
        )
        found._as_written, found._started_in = self.as_written, working_folder()
        return found

    def compiling(self, is_on: bool) -> Config:
        """Return the configuration with what `compile: auto` means on a machine."""
        found = self.model_copy(update={"compile": is_on})
        found._as_written = self.as_written
        return found

    @property
    def as_written(self) -> Config:
        """The configuration before its paths were made absolute, and before it was known what auto means."""
        return self._as_written or self

    def check_num_ranks(self, num_ranks: int) -> None:
        """Refuse more ranks than lanes."""
        batch, cell = self.batch, self.parallel.cell
        if num_ranks > cell.most_ranks(batch.num_lanes):
            who = f"{num_ranks} ranks" if cell.crew == 1 else f"{num_ranks // cell.size} cells of ranks"
            raise ConfigError(
                f"{who}, but only {batch.num_lanes} lanes (batch.global_batch {batch.global_batch} / "
                f"batch.micro_batch {batch.micro_batch}): start fewer ranks, or make batch.micro_batch smaller"
            )

    @property
    def checkpoint_url(self) -> str:
        return self.checkpoint.url or self.run.dir

    @property
    def run_name(self) -> str:
        return self.run.name or Path(self.run.dir).name[:MOST_CHARS_OF_A_NAME]

    def identity(self) -> str:
        """Return a digest of the keys that determine order and state; a run resumes only with the same digest.

        Every commit records it next to the manifest's digest. Other keys (a learning rate, more epochs) may change.
        """
        fixed = [
            self.run.seed,
            self.as_written.task.model_dump(mode="json"),
            self.batch.model_dump(),
            self.data.block_row_groups,
        ]
        fixed += ["length_bucketing"] if self.data.length_bucketing else []
        fixed += [["mixture", self.data.shares]] if self.data.shares else []
        return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()

    def changed_since(self, before: Mapping[str, object]) -> dict[str, tuple[object, object]]:
        """Return by key what an earlier resolved configuration had, and what this one has, where they differ."""
        return dict(_changes(before, self.as_written.model_dump(mode="json"), ""))

    def to_yaml(self) -> str:
        """Return the resolved configuration as YAML; `load` reads it back to the same values but for passwords."""
        tree = self.as_written.model_dump(mode="json")
        # JSON would make text of a mapping's keys that are numbers
        tree["task"]["params"] = yaml12.plain(self.as_written.task.params)
        tree["optimizer"]["options"] = yaml12.plain(self.optimizer.options)
        for section, key in credentials.MAY_HAVE:
            if tree[section][key] is not None:
                tree[section][key] = credentials.without_password(tree[section][key])
        return ("" if self._started_in is None else f"{STARTED_IN}{self._started_in}\n") + yaml12.write(tree)

    def left_out(self) -> dict[str, str]:
        """Return by key what `to_yaml` leaves out: the addresses that have a password."""
        tree = self.model_dump(mode="json")
        addresses = {f"{section}.{key}": tree[section][key] or "" for section, key in credentials.MAY_HAVE}
        return {key: text for key, text in addresses.items() if credentials.without_password(text) != text}


def _changes(before: Mapping[str, object], now: Mapping[str, object], prefix: str) -> Iterator[tuple[str, Change]]:
    """Yield what differs, by dotted key; keys that only one of them knows count below task.params alone."""
    for name in {**before, **now}:
        is_known = name in before and name in now
        old, new = before.get(name), now.get(name)
        if (not is_known and prefix != "task.params.") or old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changes(old, new, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", (old, new)


def _absolute_tracker(uri: str | None) -> str | None:
    """Return the address of a tracker that is a file, or a folder, with its absolute path, and any other unchanged."""
    scheme, slashes, path = (uri or "").partition(":///")
    if slashes and scheme.startswith("sqlite") and path:
        return f"{scheme}:///{absolute(path)}"
    return uri if ":" in (uri or "") or (uri or "").startswith("databricks") else absolute(uri)


def keys() -> Iterator[tuple[str, str, str, str]]:
    """Yield (key, type, default, meaning) of every key."""
    yield from keys_of(Config)
