"""The configuration of a run: one tree of typed keys, each with a good default.

`elastic_train.config.sources` reads the values. The number of lanes is not a key: it is
`batch.global_batch / batch.micro_batch`.
"""

from __future__ import annotations

import hashlib
import json
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import (
    BaseModel,
    ByteSize,
    Field,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    field_validator,
    model_validator,
)
from pydantic_core import to_jsonable_python

from elastic_train.config import credentials, yaml12
from elastic_train.config.combinations import Feature, Found, refusals
from elastic_train.config.datasets import DataConfig, names_of
from elastic_train.config.monitoring import MonitoringConfig, ProfileConfig
from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.recipe import OptimizerConfig, ValidationConfig, checked_best
from elastic_train.config.section import MOST_CHARS_OF_A_NAME, Old, Section, Value, absolute, checked_name, folder, home
from elastic_train.system.wording import counted, nearest

Change = tuple[object, object]
"""What a key was before, and is now."""
IDENTITY = ("run.seed", "task", "batch", "data.block_row_groups", "data.length_bucketing", "data.mixture")
"""Keys and sections that `Config.identity` is made of."""


class RunConfig(Section):
    dir: str = "runs/default"
    """Local folder for everything that the run writes; start again with the same one to resume."""
    name: str | None = None
    """Name shown in MLflow; default: the folder's name."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Seed of the order, initial weights, dropout and augmentation."""
    forensic: bool = False
    """Record every step's sample ids in the history, for `elastic-train audit --forensic` to name the wrong ones."""
    audit_lanes: PositiveInt | None = None
    """Have one lane in so many computed by another replica, too, which finds devices that compute wrongly: both must
    have the same gradient, bit for bit. A step with one that differs is repeated. null for none, at no cost."""
    health_check: bool = True
    """Have each worker examine its machine before it joins a live job: matrix products, memory, disk, clock and links,
    within ten seconds; a link that seems slow is looked at for longer. One that computes or keeps wrong bits is named,
    and not let in: its node ends with code 71."""
    min_link_mb_per_s: PositiveFloat | None = 0.1
    """Megabytes a second, each way, that the best of a node's links to some nodes that train must have, or the node is
    not let in. The default is for links that are of no use at all; null to only tell what they have."""
    OLD: ClassVar[Mapping[str, Old]] = {
        "history_bytes": Old(int, 256 << 20, "is ignored: a process's history of a term has at most 256 MiB"),
        "history_terms": Old(int | None, 100, "is ignored: the histories of 100 terms are kept"),
    }

    _is_folder = field_validator("dir")(folder)

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        return checked_name(name, MOST_CHARS_OF_A_NAME)


class TaskConfig(Section):
    path: str = "elastic_train.tasks.text_classifier:TextClassifier"
    """The task to train, as module:Class; elastic_train.tasks.task.Task has the six methods of your own."""
    params: dict[str, Value] = Field(default_factory=dict)
    """Keyword arguments for the task's class."""


class BatchConfig(Section):
    global_batch: PositiveInt = 64
    """Samples per optimizer step, whatever the number of nodes."""
    micro_batch: PositiveInt = 8
    """Samples per lane and step. There are global_batch / micro_batch lanes; a job can use at most that many ranks."""

    @model_validator(mode="after")
    def _divides(self) -> BatchConfig:
        if self.global_batch % self.micro_batch:
            below = self.global_batch - self.global_batch % self.micro_batch
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of micro_batch {self.micro_batch}; "
                f"the nearest are {below} and {below + self.micro_batch}"
            )
        return self

    @property
    def num_lanes(self) -> int:
        return self.global_batch // self.micro_batch


_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "day": 86400.0, "days": 86400.0}


def _periods_of(text: str | None) -> dict[str, float]:
    """Return the periods of a text, in steps and in seconds; ValueError for what names none."""
    periods = dict[str, float]()
    for part in text.split(",") if text is not None else ():
        found = re.fullmatch(r"(\d+(?:\.\d+)?) *(steps?|s|min|h|days?)", part.strip())
        if found is None or not float(found[1]) or (found[2].startswith("step") and not found[1].isdecimal()):
            raise ValueError(f"'{part.strip()}' is no period: write '10000 steps', '90 s', '15 min', '2 h' or '1 day'")
        unit = "steps" if found[2].startswith("step") else "s"
        if unit in periods:
            raise ValueError(f"names two periods in {'steps' if unit == 'steps' else 'time'}: give one of each")
        periods[unit] = float(found[1]) * _SECONDS.get(found[2], 1.0)
    return periods


def _keep_every(old: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the periods of a section that has a key for steps, and one for seconds."""
    given = ((old.get("keep_every_steps"), "steps"), (old.get("keep_every_s"), "s"))
    return {"keep_every": ", ".join(f"{number} {unit}" for number, unit in given if number is not None)}


class CheckpointConfig(Section):
    url: str | None = None
    """Folder or fsspec URL where commits are published; default: run.dir."""
    near_dir: str | None = None
    """Local folder on every node, such as tmpfs, for copies of the newest commits; a matching copy is read first."""
    every_steps: PositiveInt | Literal["auto"] | None = 50
    """Commit every this many steps; null to ignore the step count. auto: at the interval, in place of every_s, that
    loses the least time to saves and faults, by those measured so far."""
    every_s: PositiveFloat | None = 900.0
    """Commit this many seconds after the last commit; null to ignore the time."""
    rpo_s: PositiveFloat = 900.0
    """With every_steps: auto, the most seconds of training that a fault may cost (recovery point objective)."""
    when_busy: Literal["skip", "wait"] = "skip"
    """If a commit is due while the last one is still being written: skip it, or wait."""
    give_up_after_s: float | None = Field(default=600.0, ge=0)
    """End training with an error when ten commits in a row, and all commits for this many seconds, have failed; null
    for never."""
    accept_loss: str | None = None
    """A commit, as term-step, that the store has lost: continue from an older one all the same. Without it the start is
    refused, with the value to set. It holds for that commit alone, so it may stay set."""
    keep_last: PositiveInt = 5
    """Newest commits to keep. The newest verified commit, pinned ones and those in use are never deleted."""
    keep_every: str | None = None
    """Also keep the first commit of every period: '10000 steps', '1 h' (s, min, h, days), or both: '10000 steps, 1
    days'."""
    keep_best: str | None = None
    """Also keep the commit with the best value of a validation metric: 'min loss', 'max macro_f1'."""
    storage_budget: ByteSize | None = Field(default=None, gt=0)
    """In place of keep_last: as many of the newest commits as fit, with what other rules keep, into 200GB, say."""

    OLD: ClassVar[Mapping[str, Old]] = {
        "interval": Old(str | None, None, "is now every_steps: auto", lambda old: {"every_steps": "auto"}),
        "give_up_after": Old(
            int | None,
            10,
            "is ignored, and is ten; for never, set give_up_after_s to null",
            lambda old: {"give_up_after_s": None} if old["give_up_after"] is None else {},
        ),
        "keep_every_steps": Old(int | None, None, "is now keep_every: 'N steps'", _keep_every),
        "keep_every_s": Old(float | None, None, "is now keep_every: 'N s'", _keep_every),
    }
    _is_folder = field_validator("near_dir")(folder)
    _expands = field_validator("url")(home)

    @field_validator("keep_every")
    @classmethod
    def _names_periods(cls, text: str | None) -> str | None:
        _periods_of(text)
        return text

    @property
    def keep_every_steps(self) -> int | None:
        steps = _periods_of(self.keep_every).get("steps")
        return None if steps is None else int(steps)

    @property
    def keep_every_s(self) -> float | None:
        return _periods_of(self.keep_every).get("s")

    @field_validator("accept_loss")
    @classmethod
    def _names_a_commit(cls, text: str | None) -> str | None:
        if text is not None and re.fullmatch(r"\d+-\d+", text) is None:
            raise ValueError(f"'{text}' names no commit: give its term and step, such as 5-1200")
        return text

    @field_validator("keep_best")
    @classmethod
    def _names_a_best(cls, text: str | None) -> str | None:
        return None if text is None else checked_best(text)


class TrackingConfig(Section):
    mlflow_uri: str | None = None
    """MLflow tracking URI, such as sqlite:///mlflow.db; null for local metrics only."""
    experiment: str = "elastic-train"
    """MLflow experiment."""
    tensorboard: bool = False
    """Also write event files for TensorBoard, below run.dir/tensorboard; needs the extra [tensorboard]."""
    wandb: Literal["online", "offline"] | None = None
    """Also log to Weights & Biases; offline: to run.dir/wandb, which `wandb sync` uploads. Needs the extra [wandb]."""
    wandb_project: str = "elastic-train"
    """Project in Weights & Biases."""

    @field_validator("experiment")
    @classmethod
    def _is_an_experiment(cls, name: str) -> str | None:
        return checked_name(name, 256)

    @field_validator("wandb_project")
    @classmethod
    def _is_a_project(cls, name: str) -> str | None:
        return checked_name(name, MOST_CHARS_OF_A_NAME, without="/\\#?%:")


class Config(Section):
    """A checked configuration, frozen; `elastic-train keys` lists every key with its type, default and meaning.

    `load_config` makes one from a file. `Config(data={"train": "data/rows"})` makes one from values alone, and raises
    pydantic's ValidationError, a ValueError, if they are wrong.
    """

    _as_written: Config | None = PrivateAttr(default=None)
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
    """Passes over the training set; of a mixture, over each source, until the slowest has had them all."""
    max_steps: PositiveInt | None = None
    """Stop after this many steps, even in the middle of an epoch; overrides epochs."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """bf16: autocast. fp16: autocast and a gradient scaler."""
    compile: bool = False
    """Compile the model's blocks with torch.compile, for the shape of the run's first micro-batch; others are computed
    without. Needs a C++ compiler on CPUs, Triton on GPUs. The same bits in every world, but not those of false."""
    reduction: Literal["canonical", "fast"] = "canonical"
    """canonical: the same bits at any world size. fast: all_reduce, whose rounding varies with the world size."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the node's GPUs if it has any, else the CPU."""
    threads_per_rank: PositiveInt = 1
    """Compute threads per rank, the same in all worlds: another number may round differently."""
    peer_timeout_s: PositiveFloat = 300.0
    """Seconds that a collective waits for a silent peer before the world is abandoned."""
    give_up_after_worlds: PositiveInt | None = 20
    """End with exit code 93 after this many worlds in a row that end without a step; null for never."""
    give_up_after_s: PositiveFloat = 1800.0
    """Worlds that do not form, or that processes outlive, end the job only if that goes on for so many seconds, too."""
    hang_timeout_s: PositiveFloat | None = None
    """Seconds that a rank may work without progress before it dumps its stacks and exits; null: learned from its steps.

    Warming up, before the first world, may take ten times as long; with null, ten minutes."""

    @property
    def features(self) -> Mapping[Feature, str]:
        """The features that are set, and how: by key and value."""
        own: Mapping[Feature, str | None] = {
            "compile": "compile: true" if self.compile else None,
            "reduction: fast": "reduction: fast" if self.reduction == "fast" else None,
            "audit_lanes": None if self.run.audit_lanes is None else f"run.audit_lanes: {self.run.audit_lanes}",
            "ema": None if self.optimizer.ema is None else "optimizer.ema",
        }
        return {**self.parallel.features, **{feature: text for feature, text in own.items() if text is not None}}

    def found(self) -> Iterator[Found]:
        """Yield the traits that the configuration itself has."""
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
        if self.validation.weights == "ema" and self.optimizer.ema is None:
            raise ValueError("validation.weights: ema needs an average: set optimizer.ema, such as {decay: 0.999}")
        if self.validation.early_stopping is not None and self.validation.every_steps is None:
            raise ValueError("validation.early_stopping needs validations to judge by: set validation.every_steps")
        return self

    def anchored(self) -> Config:
        """Return the configuration with absolute paths: code of a task may change the working folder at any time.

        What is recorded and compared stays as it is written, so that a run can be moved (`as_written`).
        """
        data, params = self.data, dict(self.task.params)
        hf = params.get("hf")
        if isinstance(hf, Mapping) and isinstance(hf.get("path"), str):
            params["hf"] = {**hf, "path": absolute(hf["path"])}
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
        found._as_written = self.as_written
        return found

    @property
    def as_written(self) -> Config:
        """The configuration before its paths were made absolute."""
        return self._as_written or self

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
        tree["task"]["params"] = _as_yaml(self.as_written.task.params)
        tree["optimizer"]["options"] = _as_yaml(self.optimizer.options)
        for section, key in credentials.MAY_HAVE:
            if tree[section][key] is not None:
                tree[section][key] = credentials.without_password(tree[section][key])
        return yaml12.write(tree)

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


def _as_yaml(value: object) -> object:
    """Return a value of a program, or of a file, as YAML can hold it."""
    if isinstance(value, dict):
        return {name: _as_yaml(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_yaml(each) for each in value]
    return to_jsonable_python(value, inf_nan_mode="constants")


def keys() -> Iterator[tuple[str, str, str, str]]:
    """Yield (key, type, default, meaning) of every key."""
    yield from _keys_of(Config, "")


def _keys_of(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys_of(kind, f"{prefix}{name}.")
            continue
        if (element := _element_of(kind)) is not None:
            yield f"{prefix}{name}", "list | None", "None", field.description or ""
            yield from _keys_of(element, f"{prefix}{name}[].")
            continue
        optional = next((one for one in _parts_of(kind) if issubclass(one, BaseModel)), None)
        shown = getattr(kind, "__name__", str(kind)) if isinstance(kind, type) else str(kind)
        shown = shown.replace("typing.", "").replace(", Gt(gt=0)", "").replace("Annotated[int]", "int")
        shown = shown if optional is None else "section | None"
        default = "required" if field.is_required() else str(field.get_default(call_default_factory=True))
        yield f"{prefix}{name}", shown, default, field.description or ""
        if optional is not None:
            yield from _keys_of(optional, f"{prefix}{name}.")


def _parts_of(kind: object) -> list[type]:
    """Return the classes that a type is a union of, if it is one."""
    return [one for one in get_args(kind) if isinstance(one, type)] if isinstance(kind, types.UnionType) else []


def _element_of(kind: object) -> type[BaseModel] | None:
    """Return the section that a key is a list of; None for other keys."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return next((found for part in get_args(kind) if (found := _element_of(part)) is not None), None)


def nearest_key(name: str) -> str | None:
    """Return the key or section closest to an unknown one, else the closest by its last part; None if none is alike."""
    known = [*(key for key, *_ in keys()), *Config.model_fields]
    by_tail = {key.rpartition(".")[2]: key for key in known}
    return nearest(name, known, cutoff=0.5) or by_tail.get(nearest(name.rpartition(".")[2], by_tail) or "")
