"""What a run is before any world has formed: task, data, order, length, device; checked in full, or refused.

A plan reads manifests and imports the task. It touches no peer, claims no term, and survives every change of the world.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from elastic_train.checkpoint import CommitRecord, Retention
from elastic_train.config.schema import Config, parse_best
from elastic_train.core.keyed_random import derive
from elastic_train.core.length_buckets import Arrangement, LengthBuckets
from elastic_train.core.order import VERSION, Order
from elastic_train.data.dataset.manifest import Manifest, load_manifest
from elastic_train.data.dataset.row_lengths import NAME as LENGTHS
from elastic_train.data.dataset.row_lengths import load_lengths
from elastic_train.errors import ConfigError, DataError
from elastic_train.job.sample_streams import Feed
from elastic_train.job.state import AppliedState, build_state
from elastic_train.job.units.compiled import CompiledBlocks, check_can_compile
from elastic_train.system.wording import counted, did_you_mean, nearest
from elastic_train.tasks.task import OWN_VALUES, Grouping, Task, load_task

_INITIAL_WEIGHTS = 4  # separates the initial weights' random numbers from order and dropout


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked configuration with all that follows from it."""

    config: Config
    task: Task
    manifest: Manifest
    order: Order
    feed: Feed
    total_steps: int
    device: torch.device

    @property
    def num_lanes(self) -> int:
        return self.config.batch.num_lanes

    @property
    def micro_batch(self) -> int:
        return self.config.batch.micro_batch

    @property
    def retention(self) -> Retention:
        """Which commits stay."""
        keep = self.config.checkpoint
        return Retention.of(
            last=keep.keep_last,
            every_steps=keep.keep_every_steps,
            every_s=keep.keep_every_s,
            best=keep.keep_best,
            budget=keep.storage_budget,
        )

    def build_state(self) -> AppliedState:
        """Build model and optimizer from the run's seed, so that every rank begins with the same bits.

        Raises ConfigError if the task's parameter groups do not fit its model.
        With `compile` nothing is compiled before `warm_up`.
        """
        torch.manual_seed(derive(self.config.run.seed, _INITIAL_WEIGHTS) >> 1)
        model = self.task.build_model().to(self.device)
        check_model(model)
        model.train()
        is_fp16 = self.config.precision == "fp16"
        groups = self.task.parameter_groups(model) if isinstance(self.task, Grouping) else ()
        config = self.config
        compiled = CompiledBlocks(model) if config.compile else None  # before recomputation, which runs it twice
        state = build_state(
            model, config.optimizer, self.total_steps, self.device.type, is_fp16, groups, config.parallel
        )
        state.compiled = compiled
        return state

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which a lane's loss is computed."""
        if self.config.precision == "fp32":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.config.precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype=dtype)

    def check_continues(self, record: CommitRecord) -> None:
        """Refuse to resume from a commit whose order or data are not this plan's."""
        config, manifest = self.config, self.manifest
        if record.manifest_digest != manifest.digest:
            raise DataError(
                f"{manifest.url}: the manifest changed since {record.key} (digest {manifest.digest[:12]}, then "
                f"{record.manifest_digest[:12]}): restore the data it was trained on, or start again in another run.dir"
            )
        if record.config_digest != config.identity():
            raise ConfigError(
                f"run.dir {config.run.dir} holds commits of another configuration ({record.key}): run.seed, task, "
                "batch, data.block_row_groups and data.length_bucketing must stay as they were; start again in another "
                "run.dir to change them"
            )
        if (record.order or {}).get("version") != VERSION:
            raise ConfigError(
                f"run.dir {config.run.dir} holds commits whose samples are in the order of another version "
                f"({record.key}): finish the run with the version that began it, or start again in another run.dir"
            )
        if (record.order or {}).get("lengths", 0) != fingerprint_of(self.order):
            raise DataError(
                f"{manifest.url}/{LENGTHS}: was rebuilt from a different column after {record.key}; rebuild it from "
                "the original one"
            )

    def describe(self) -> Mapping[str, object]:
        """Return what follows from the configuration, for people who check it."""
        return {
            "samples": self.manifest.num_rows,
            "lanes": self.num_lanes,
            "ranks at most": self.num_lanes,
            "steps an epoch": self.order.num_steps(self.micro_batch),
            "steps": self.total_steps,
            "device": str(self.device),
            "commits in": self.config.checkpoint_url,
        }


def check_model(model: nn.Module) -> None:
    """Refuse a model whose forward pass talks to other ranks: what it computes would depend on the world."""
    found = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if found:
        raise ConfigError(
            f"the task's model has SyncBatchNorm ({', '.join(found)}), whose statistics depend on the number of ranks: "
            "use BatchNorm, whose running statistics become the mean over a step's lanes"
        )


def make_plan(config: Config) -> Plan:
    """Import the task, read the manifests, and check that they fit; raise ConfigError or DataError."""
    check_world_size(config, int(os.environ.get("WORLD_SIZE", "1")))
    task = load_task(config.task)
    device = pick_device(config)
    if config.compile:
        check_can_compile(device)
    manifest = load_manifest(config.data.train)
    task.prepare(manifest)
    check_best(config, task)
    order = Order(
        manifest.group_rows,
        num_lanes=config.batch.num_lanes,
        seed=config.run.seed,
        block_row_groups=config.data.block_row_groups,
        arrangement=arrangement_of(config, manifest),
    )
    return Plan(
        config=config,
        task=task,
        manifest=manifest,
        order=order,
        feed=Feed(config, task, manifest),
        total_steps=config.max_steps or config.epochs * order.num_steps(config.batch.micro_batch),
        device=device,
    )


def arrangement_of(config: Config, manifest: Manifest) -> Arrangement | None:
    """Return how samples are dealt into micro-batches, None for as they come."""
    if not config.data.length_bucketing:
        return None
    lengths = load_lengths(manifest)
    return LengthBuckets(lengths, config.batch.micro_batch, fingerprint=lengths.fingerprint)


def fingerprint_of(order: Order) -> int:
    """Return what tells an order's arrangement from others, 0 for none."""
    return order.arrangement.fingerprint if order.arrangement else 0


def check_world_size(config: Config, world_size: int) -> None:
    """Refuse a world with more ranks than lanes."""
    batch = config.batch
    if world_size > batch.num_lanes:
        raise ConfigError(
            f"{world_size} ranks, but only {batch.num_lanes} lanes (batch.global_batch {batch.global_batch} / "
            f"batch.micro_batch {batch.micro_batch}): start fewer ranks, or make batch.micro_batch smaller"
        )


def check_best(config: Config, task: Task) -> None:
    """Refuse a best commit by a metric that no validation gives: it would keep none, and nobody would notice."""
    text = config.checkpoint.keep_best
    if text is None:
        return
    if config.data.validation is None:
        raise ConfigError(f"checkpoint.keep_best '{text}': no data.validation to measure it on; give one, or null here")
    metric, _ = parse_best(text)
    if metric in OWN_VALUES:
        return  # to ask a task for its metrics may import them, for a second
    known = [*OWN_VALUES, *task.metrics()]
    if metric not in known:
        meant = did_you_mean(nearest(metric, known), f"; it has {', '.join(known)}")
        raise ConfigError(f"checkpoint.keep_best '{text}': a validation of {config.task.path} has no '{metric}'{meant}")


def pick_device(config: Config) -> torch.device:
    """Return this rank's device: its own GPU where the node has GPUs and the configuration allows."""
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError("device: cuda is asked for, but this node has no GPU that torch can use")
    if not has_gpu or config.device == "cpu":
        return torch.device("cpu")
    rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= num_gpus and config.parallel.transport == "auto":
        raise ConfigError(
            f"worker {rank} of this node finds {counted(num_gpus, 'GPU')}, and NCCL needs one for each: start no more "
            f"workers than GPUs (--nproc-per-node {num_gpus}), or set parallel.transport to gloo, and they share"
        )
    device = torch.device("cuda", rank % num_gpus)
    torch.cuda.set_device(device)
    return device
