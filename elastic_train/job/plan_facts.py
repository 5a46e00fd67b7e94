"""Describe what a configuration implies for a mixture's sources, a pipeline, a device, memory, and a fault's cost."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import yaml

from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import read
from elastic_train.config.schema import Config
from elastic_train.core.mesh import Mesh
from elastic_train.core.mixture import Mixture
from elastic_train.data.dataset.training_sources import Source
from elastic_train.errors import ConfigError, StorageError
from elastic_train.job.optimizers.choice import choose
from elastic_train.job.sharded.elementwise import slots_of
from elastic_train.placement.table import Table
from elastic_train.program.schedules import Pipeline, bubble
from elastic_train.system.wording import counted
from elastic_train.tracking.run_folder import RunFolder


def check_folders(config: Config) -> None:
    """Refuse a file in the place of the folder of commits; a folder that does not exist is created later.

    With commits elsewhere, a node that cannot write `run.dir` trains without a history of its own, as on a full disk.
    """
    key, url = "checkpoint.url" if config.checkpoint.url else "run.dir", config.checkpoint_url
    path = Path(url.removeprefix("file://").removeprefix("local://"))
    with contextlib.suppress(OSError):  # the first write says what is wrong
        there = next(each for each in (path, *path.parents) if each.exists())
        if not there.is_dir():  # a URL has no folder here
            raise ConfigError(f"{key} {url}: {there} is a file, not a folder; name another place")


def config_of(config: Config, term: int) -> Mapping[str, object]:
    """Return the stored configuration of the run's last start, or of a term; empty if there is none.

    The run folder has that of the last start; the commit storage has those of terms, if it is elsewhere.
    """
    with contextlib.suppress(ConfigError):
        return RunFolder(Path(config.run.dir)).config()
    with contextlib.suppress(StorageError, yaml.YAMLError):
        found = yaml.safe_load(read(open_store(config.checkpoint_url), f"configs/{term:08d}.yaml"))
        return found if isinstance(found, dict) else {}
    return {}


def describe_changes(config: Config, before: Mapping[str, object], only: Sequence[str] = ()) -> list[str]:
    """Describe each changed key, its old and new value; `only` restricts to these keys and those below them."""
    return [
        f"{key} was {old!r} and is {new!r} now"
        for key, (old, new) in config.changed_since(before).items()
        if not only or any(f"{key}.".startswith(f"{name}.") for name in only)
    ]


def describe_sources(order: Mixture, sources: Sequence[Source], length: int) -> dict[str, str]:
    """Return each source's share of a batch and its number of epochs within `length` places of a lane."""
    counts = np.sum([order.counts(lane, length) for lane in range(order.num_lanes)], axis=0)
    return {
        f"source {source.name}": f"{source.manifest.num_rows} samples, {source.share} of {sum(order.shares)} places, "
        f"{count / source.manifest.num_rows:.2f} epochs"
        for source, count in zip(sources, counts, strict=True)
    }


def describe_pipeline(config: Config) -> str:
    """Describe the pipeline's idle time with all lanes in one cell; with more cells, each has fewer lanes."""
    parallel, num_lanes = config.parallel, config.batch.num_lanes
    of_each = -(-num_lanes // parallel.expert)  # each expert-parallel rank runs its own pipeline
    waits = bubble(Pipeline(parallel.order, parallel.pipeline, of_each, parallel.num_chunks))
    chunks = f" with {parallel.num_chunks} chunks each" if parallel.num_chunks > 1 else ""
    return (
        f"{parallel.pipeline} stages{chunks}, {parallel.order}; with all {num_lanes} lanes in one cell they wait "
        f"{100 * waits:.0f} % of a step"
    )


def describe_offload(config: Config, device: torch.device) -> str:
    """Describe how much of each parameter that a rank holds is in host memory."""
    choice = choose(config.optimizer, device.type)
    [slots] = slots_of(choice.tried(), choice.make, device)
    num = len(slots.moments) + (config.optimizer.ema_decay is not None)
    weights = 4 if config.parallel.offload == "all" else 0
    where = "the host's memory, which is this device's" if device.type == "cpu" else "pinned host memory"
    return f"{4 * num + weights} of {4 * num + 8} bytes of each fp32 parameter that a rank holds are in {where}"


_USUAL_RATES = {
    "adapters": "1e-4 to 5e-4",
    "fine-tuning all weights": "5e-6 to 1e-4",
    "weights from scratch": "3e-4 to 3e-3",
}
"""Common peak rates of AdamW, by what is trained."""


def describe_rate(config: Config) -> str:
    """Return the peak learning rate and the usual range for this kind of training."""
    params, optimizer = config.task.params, config.optimizer
    if optimizer.name != "adamw":
        return f"{optimizer.lr:g} at most"
    folder = params.get("hf")
    is_trained = isinstance(folder, Mapping) and "path" in folder
    kind = "adapters" if params.get("lora") or params.get("adapter") else "fine-tuning all weights"
    what = kind if kind == "adapters" or is_trained else "weights from scratch"
    return f"{optimizer.lr:g} at most; usual for {what}: {_USUAL_RATES[what]}"


def describe_tests(config: Config, device: torch.device) -> str | None:
    """Say on which hardware the configured degrees were tested; None if there is nothing to say."""
    if config.parallel.cell.size == 1 or device.type == "cpu":
        return None
    return (
        f"{config.parallel.set_degrees} on GPUs was run with a stand-in for the device only, never on a GPU: train a "
        "short job first, and compare its losses with those of the same job on CPUs"
    )


def redundancy_of(mesh: Mesh, table: Table) -> str | None:
    """Describe the cost of a fault, given how many ranks hold the same state; None if each holds all of it alone."""
    context = mesh.cell.context
    num_ranks = counted(mesh.cell.size, "rank")
    if not table.is_whole and (mesh.cell.size == 1 or mesh.size > mesh.cell.num_parts):
        what = "state" if table.shares_weights else "optimizer's state"
        if mesh.cell.size > 1:
            of_each = " of each place" if context == 1 else " of each part" if mesh.cell.holds_parts else ""
            held = f"{counted(mesh.num_replicas, 'cell')} of {num_ranks}, over which the {what}{of_each} is held"
        else:
            held = f"the {what} is held"
        if table.num_copies == 1:
            return (
                f"{held} once: if a rank is lost, its share is lost, and the job resumes from the newest commit "
                "(set parallel.copies, or use more ranks)"
            )
        return f"{held} {table.num_copies} times: a fault that leaves one of the holders costs no applied step"
    if mesh.cell.size == 1:
        return None
    if not mesh.cell.holds_parts:
        return (
            f"{counted(mesh.num_replicas, 'cell')} of {num_ranks}, which compute each row together: every rank holds "
            "the whole state, so a fault that leaves one of them costs no applied step"
        )
    if mesh.num_replicas == 1 and context > 1:
        return (
            f"{num_ranks} make one cell, and {context} hold each part of the state: a fault that leaves one "
            "of these costs no applied step"
        )
    if mesh.num_replicas == 1:
        return (
            f"{num_ranks} make one cell, the only holder of the state: if a rank is lost, its part is lost, and the "
            "job resumes from the newest commit (more nodes make more cells)"
        )
    return (
        f"{mesh.num_replicas} cells of {num_ranks}: a fault that leaves each part of the state in one of them costs no "
        "applied step"
    )
