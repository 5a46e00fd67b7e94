"""The plan of a run before any world has formed: task, data, order, length and device, completely checked.

A plan reads manifests and imports the task. It contacts no peer, claims no term, and stays valid across worlds.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.retention_policies import Retention
from elastic_train.config.recipe import parse_best
from elastic_train.config.schema import IDENTITY, Config
from elastic_train.core.accounting import CoverageSums
from elastic_train.core.keyed_random import derive
from elastic_train.core.mixture import Mixture, RunOrder
from elastic_train.core.order import VERSION, Order
from elastic_train.data.dataset.manifest import Manifest, load_manifest
from elastic_train.data.dataset.row_lengths import NAME as LENGTHS
from elastic_train.data.dataset.training_sources import (
    Source,
    count_steps,
    fingerprint_of,
    join,
    load_sources,
    order_of,
)
from elastic_train.errors import ConfigError, DataError
from elastic_train.job.build import build_state
from elastic_train.job.cells.cell_plan import cell_plan_of, check_fits_cells, check_fits_float8, cut_dims_of
from elastic_train.job.cells.cut_model import all_weights
from elastic_train.job.model_layout import check_model, make_gradients_dense
from elastic_train.job.optimizers.choice import choose
from elastic_train.job.optimizers.schedule import Recipe, check_schedule, say_end_of_rates
from elastic_train.job.plan_facts import (
    check_folders,
    config_of,
    describe_changes,
    describe_offload,
    describe_pipeline,
    describe_rate,
    describe_sources,
    describe_tests,
)
from elastic_train.job.sample_streams import Feed
from elastic_train.job.sharded.elementwise import slots_of
from elastic_train.job.sharded.zero3_share import without_memory
from elastic_train.job.state import AppliedState
from elastic_train.job.units.compiled import CompiledBlocks, check_can_compile, decide
from elastic_train.job.units.float8 import check_multiplies, scale_linear_layers
from elastic_train.parallel.devices.switches import begin_training
from elastic_train.system.wording import counted, did_you_mean, nearest
from elastic_train.tasks.preparing import prepare
from elastic_train.tasks.task import OWN_VALUES, Deferring, Grouping, Task, load_task, sketch_of
from elastic_train.tracking.destinations import event_files, weights_and_biases
from rendezvous.context import live_context

log = logging.getLogger(__name__)
_INITIAL_WEIGHTS = 4  # separates the random numbers of the initial weights from order and dropout


@dataclass(frozen=True, slots=True)
class Plan:
    """A validated configuration and everything derived from it.

    `manifest` lists the rows of all `sources` of a mixture. `why_compiled` explains `compile: auto` on this GPU.
    """

    config: Config
    task: Task
    manifest: Manifest
    order: RunOrder
    feed: Feed
    total_steps: int
    device: torch.device
    sources: tuple[Source, ...] = ()
    why_compiled: str | None = None

    @property
    def num_lanes(self) -> int:
        return self.config.batch.num_lanes

    @property
    def micro_batch(self) -> int:
        return self.config.batch.micro_batch

    @property
    def validates_every(self) -> int | None:
        """Number of steps between validations; None for only at the end."""
        keys = self.config.validation
        if keys.every_epochs is None:
            return keys.every_steps
        return keys.every_epochs * self.order.num_steps(self.micro_batch)

    @property
    def retention(self) -> Retention:
        """The rules by which commits are kept."""
        keep, stopping = self.config.checkpoint, self.config.validation.early_stopping
        best = [keep.keep_best, stopping.metric if stopping is not None else None]
        return Retention.of(
            last=keep.keep_last,
            every_steps=keep.keep_every_steps,
            every_s=keep.keep_every_s,
            best=[metric for metric in best if metric is not None],
            budget=keep.budget,
        )

    def build_state(self, *, may_defer: bool = False) -> AppliedState:
        """Build model and optimizer from the run's seed, so that every rank starts with the same bits.

        Compiles nothing before `warm_up`. With `may_defer`, each rank makes only its own sharded weights, when it takes
        its first seat, if the task supports deferred initialization. Raises ConfigError if the task's parameter groups
        do not fit its model.
        """
        self._seed_weights()
        sketch = self._sketch() if may_defer else None
        model = self.task.build_model() if sketch is None else sketch
        check_model(model)
        model = model.to(self.device) if sketch is None else model
        make_gradients_dense(model)
        if kept := begin_training(model):
            log.warning(
                "build_model leaves %s in eval mode (first '%s'), without dropout, for instance: training keeps that. "
                "If they are to train, call their train() there",
                counted(len(kept), "module"),
                kept[0],
            )
        if self.config.precision == "fp8":
            check_multiplies(self.device)
            scale_linear_layers(model)
        is_fp16 = self.config.precision == "fp16"
        groups = self.task.parameter_groups(model) if isinstance(self.task, Grouping) else ()
        config = self.config
        # Before recomputation, which runs it twice.
        compiled = CompiledBlocks(model) if config.compile is True else None
        cells = cell_plan_of(self.task, model, config.parallel)
        if config.precision == "fp8" and cells is not None:
            check_fits_float8(cells, model, config.parallel.tensor)
        dims = cut_dims_of(self.task, model) if cells is None else cells.dims
        gathers = torch.bfloat16 if config.parallel.wire == "bf16" and self.compute_type is torch.bfloat16 else None
        how = config.parallel, cells, dims, gathers
        if any(dims.values()):
            choice = choose(config.optimizer, self.device.type)
            choice.rehearse(config.optimizer.name, self.device, by_columns=True)
        state = build_state(model, config.optimizer, self.total_steps, self.device.type, is_fp16, groups, *how)
        state.compiled = compiled
        state.keep_recipe(Recipe(config.optimizer, self.total_steps, config.compile is True))
        if sketch is not None and not config.parallel.cell.holds_parts:
            state.shards.share.first_weights = self._initial_weights
        return state

    def _seed_weights(self) -> None:
        torch.manual_seed(derive(self.config.run.seed, _INITIAL_WEIGHTS) >> 1)

    def _sketch(self) -> nn.Module | None:
        """Return the model without weights if it can be initialized later; a compiler needs a pass with all weights."""
        config = self.config
        shares_weights = config.parallel.shards == "parameters" or config.parallel.pipeline > 1
        sketch = sketch_of(self.task) if shares_weights and config.compile is not True else None
        return None if sketch is None else without_memory(sketch, self.device)

    def first_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the initial weights and buffers by name, one by one if the task supports it."""
        if self._sketch() is not None:
            yield from self._initial_weights()
        else:
            yield from all_weights(self.build_state().model).items()

    def _initial_weights(self) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(self.task, Deferring), "it has made a sketch"
        with torch.random.fork_rng([]):
            self._seed_weights()
            yield from self.task.initial_weights()

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which a lane's loss is computed."""
        dtype = self.compute_type
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    @property
    def compute_type(self) -> torch.dtype | None:
        """Dtype of autocast; None without autocast."""
        return None if self.config.precision == "fp32" else getattr(torch, self.config.compute_type)

    @contextlib.contextmanager
    def keep_casts(self, num_lanes: int) -> Iterator[None]:
        """Keep autocast's cast weights across the lanes of a step, if the device has the memory.

        autocast drops them when the outermost of nested contexts ends. On a CPU they would cost more memory in the
        backward pass than the time they save.
        """
        parallel = self.config.parallel
        spares_memory = parallel.shards == "parameters" or parallel.recompute != "none" or self.device.type == "cpu"
        if self.config.precision == "fp32" or spares_memory or num_lanes < 2:
            yield
            return
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    def check_continues(self, record: CommitRecord) -> None:
        """Refuse to resume from a commit with another sample order or other data."""
        config, manifest = self.config, self.manifest
        check_same_sources(config, self.sources, record)
        if record.manifest_digest != manifest.digest:
            raise DataError(
                f"{manifest.url}: the manifest changed since {record.key} (digest {manifest.digest[:12]}, then "
                f"{record.manifest_digest[:12]}): restore the data it was trained on, or start again in another run.dir"
            )
        if record.config_digest != config.identity():
            changed = describe_changes(config, config_of(config, record.term), only=IDENTITY)
            what = "; ".join(changed) or "run.seed, task, batch, data.block_row_groups or data.length_bucketing changed"
            raise ConfigError(
                f"run.dir {config.run.dir} holds commits of another configuration ({record.key}): {what}. Set that "
                "back to continue the run, or start again in another run.dir to change it"
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

    @property
    def wholes(self) -> list[tuple[str, CoverageSums]]:
        """Sources of a mixture by name, each with the coverage sums of one pass."""
        return [(source.name, source.manifest.coverage) for source in self.sources]

    def describe(self) -> Mapping[str, object]:
        """Return the derived facts, for display."""
        order, length = self.order, self.total_steps * self.micro_batch
        recipe = Recipe(self.config.optimizer, self.total_steps, self.config.compile is True)
        return {
            "samples": self.manifest.num_rows,
            **(describe_sources(order, self.sources, length) if isinstance(order, Mixture) else {}),
            "lanes": self.num_lanes,
            "ranks at most": self.config.parallel.cell.most_ranks(self.num_lanes),
            **({"steps an epoch": order.num_steps(self.micro_batch)} if isinstance(order, Order) else {}),
            "steps": self.total_steps,
            **({"pipeline": describe_pipeline(self.config)} if self.config.parallel.pipeline > 1 else {}),
            "learning rate": describe_rate(self.config),
            **({"schedule": said} if (said := say_end_of_rates(recipe, 0)) is not None else {}),
            "device": str(self.device),
            **({"tested": tested} if (tested := describe_tests(self.config, self.device)) is not None else {}),
            **({"offload": describe_offload(self.config, self.device)} if self.config.parallel.has_offload else {}),
            "commits in": self.config.checkpoint_url,
        }


def make_plan(config: Config) -> Plan:
    """Import the task, read the manifests and check that they fit; raise ConfigError or DataError."""
    config.check_num_ranks(int(os.environ.get("WORLD_SIZE", "1")))
    check_folders(config)
    if config.tracking.tensorboard:
        event_files.check_installed()
    if config.tracking.wandb is not None:
        weights_and_biases.check_installed()
    task = load_task(config.task)
    device = pick_device(config)
    compiles, why_compiled = decide(config, task, device)
    config = config.compiling(compiles)
    if compiles:
        check_can_compile(device)
    if config.precision == "fp8":
        check_multiplies(device)
    sources = load_sources(config.data, config.batch.num_lanes)
    manifest = join(sources) if sources else load_manifest(config.data.sources[0])
    prepare(task, config.task, manifest, sources)
    check_best(config, task)
    order = order_of(config, manifest, sources)
    total_steps = count_steps(config, order)
    check_schedule(config.optimizer, total_steps)
    choice = choose(config.optimizer, device.type)
    choice.rehearse(config.optimizer.name, device)
    check_can_be_in_cells(config)
    check_placements(task, config)
    if config.parallel.has_shares or config.parallel.cell.holds_parts:
        slots_of(choice.tried(), choice.make, device)
    return Plan(
        config=config,
        task=task,
        manifest=manifest,
        order=order,
        feed=Feed(config, task, [source.manifest for source in sources] or [manifest]),
        total_steps=total_steps,
        device=device,
        sources=sources,
        why_compiled=why_compiled,
    )


def check_placements(task: Task, config: Config) -> None:
    """Raise ConfigError, with every reason found without a model, if ranks cannot split the task's model."""
    parallel = config.parallel
    check_fits_cells(task, parallel)
    if parallel.cell.size > 1 and (sketch := sketch_of(task)) is not None:
        cells = cell_plan_of(task, sketch, parallel)
        if config.precision == "fp8" and cells is not None:
            scale_linear_layers(sketch)
            check_fits_float8(cells, sketch, parallel.tensor)


def check_same_sources(config: Config, sources: Sequence[Source], record: CommitRecord) -> None:
    """Refuse to resume with sources or shares other than the commit's; name the change."""
    before = record.sources or ()
    if [source.share for source in sources] != [source.share for source in before]:
        shares = " : ".join(f"{source.share} {source.name}" for source in before) or "one training set"
        raise ConfigError(
            f"run.dir {config.run.dir} holds commits of other sources, or of other weights ({record.key}: {shares}): "
            "data.mixture must stay as it was; start again in another run.dir to change it"
        )
    for source, known in zip(sources, before, strict=True):
        if source.manifest.digest != known.manifest_digest:
            raise DataError(
                f"{source.manifest.url}: the manifest of source '{source.name}' changed since {record.key} (digest "
                f"{source.manifest.digest[:12]}, then {known.manifest_digest[:12]}): restore the data it was trained "
                "on, and the order of data.mixture, or start again in another run.dir"
            )


def check_can_be_in_cells(config: Config) -> None:
    """Refuse nodes whose workers do not form whole cells."""
    cell, degrees = config.parallel.cell, config.parallel.set_degrees
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return
    num_workers, live = int(os.environ["LOCAL_WORLD_SIZE"]), live_context()
    if live is None:
        if num_workers % cell.stage_size:
            raise ConfigError(
                f"{degrees} needs workers of one node{' for each stage' if cell.stage > 1 else ''}, and this node has "
                f"{num_workers}: start a multiple of {cell.stage_size} on each (--nproc-per-node, --ranks), or set it "
                f"to a divisor of {num_workers}"
            )
    elif num_workers < cell.stage_size:  # other nodes may complete the cells; leftover ranks are spares
        raise ConfigError(
            f"{degrees} needs {cell.stage_size} workers of one node{' for each stage' if cell.stage > 1 else ''}, and "
            f"this node has {num_workers}: start at least {cell.stage_size} (--nproc-per-node, --ranks); those beyond "
            "a multiple of it are spares"
        )
    elif live.max_nodes == 1 and num_workers < cell.size:
        raise ConfigError(
            f"{degrees} needs {cell.size} workers, and this node, the only one, has {num_workers}: start at least "
            f"{cell.size} (--nproc-per-node, --ranks), or more nodes (--nnodes, --nodes)"
        )


def check_best(config: Config, task: Task) -> None:
    """Refuse a metric that no validation computes: it would silently never be the best."""
    stopping = config.validation.early_stopping
    asked = {
        "checkpoint.keep_best": config.checkpoint.keep_best,
        "validation.early_stopping": None if stopping is None else stopping.metric,
    }
    for key, text in asked.items():
        if text is not None:
            _check_metric(f"{key} '{text}'", parse_best(text)[0], config, task)


def _check_metric(where: str, metric: str, config: Config, task: Task) -> None:
    if config.data.validation is None:
        raise ConfigError(f"{where}: no data.validation to measure it on; give one, or null here")
    if metric in OWN_VALUES:
        return  # a task may take a second to import its metrics
    known = [*OWN_VALUES, *task.metrics()]
    if metric not in known:
        meant = did_you_mean(nearest(metric, known), f"; it has {', '.join(known)}")
        raise ConfigError(f"{where}: a validation of {config.task.path} has no '{metric}'{meant}")


def pick_device(config: Config) -> torch.device:
    """Return this rank's device: its own GPU if the node has GPUs and the configuration allows it, else the CPU."""
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
