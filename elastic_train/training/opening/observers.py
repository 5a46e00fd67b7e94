"""Open a run's displays for people: trackers, the Prometheus page, traces, and rank 0's watch over all ranks."""

from __future__ import annotations

import logging
import os
import socket
from functools import partial
from pathlib import Path

from elastic_train.checkpoint import (
    CommitRecord,
)
from elastic_train.config.schema import Config
from elastic_train.core.lanes import Assignment
from elastic_train.errors import StorageError
from elastic_train.insight.page import Facts, Page
from elastic_train.insight.phases import StepClock
from elastic_train.insight.tracing import Tracer
from elastic_train.insight.utilisation import FILE as UTILISATION
from elastic_train.insight.utilisation import Utilisation
from elastic_train.parallel.gradient_sum import GradientSum
from elastic_train.tracking.destinations.destination import Destination
from elastic_train.tracking.destinations.event_files import EventFiles
from elastic_train.tracking.destinations.weights_and_biases import WeightsAndBiases
from elastic_train.tracking.history_files import host_in
from elastic_train.tracking.mlflow_run import (
    COMMIT_TAG,
    HOSTS_TAG,
    IDENTITY_TAG,
    WORLD_TAG,
)
from elastic_train.tracking.tracker import Tracker
from elastic_train.training.memory.meter import MemoryWatch, held_by
from elastic_train.training.session import Process
from elastic_train.training.watch import Watch
from elastic_train.world.fencing import CONFIGS
from elastic_train.world.world import World

log = logging.getLogger(__name__)
PHASES_EVERY_STEPS = 50
"""Steps between two rows of each rank's seconds per phase, and of its memory, in the history."""


def start_tracker(process: Process, world: World, head: CommitRecord | None) -> Tracker | None:
    """Start the tracker on rank 0, and store the resolved configuration with the commits."""
    if not world.is_leader:
        return None
    config, folder = process.plan.config, Path(process.plan.config.run.dir)
    process.files.replace(folder / "config.yaml", world.config_text)
    if process.utilisation is not None:
        process.files.replace(folder / UTILISATION, process.utilisation.to_json())
    if config.checkpoint.url is not None:
        try:
            world.store.create(f"{CONFIGS}{world.term:08d}.yaml", world.config_text.encode())
        except StorageError as error:
            world.announce(f"the configuration cannot be stored with the commits, training continues: {error}")
    return Tracker.start(
        files=process.files,
        run_dir=folder,
        term=world.term,
        config=config.as_written.model_dump(mode="json"),
        mlflow_uri=config.tracking.mlflow_uri,
        experiment=config.tracking.experiment,
        run_name=config.run_name,
        others=_other_trackers(config),
        intervals=process.state.reached.intervals,
        settled=head.step if head else 0,
        tags={
            WORLD_TAG: str(world.group.size),
            HOSTS_TAG: str(world.launched.num_nodes) if world.launched else os.environ.get("GROUP_WORLD_SIZE", "1"),
            IDENTITY_TAG: config.identity(),
            **({COMMIT_TAG: head.key} if head else {}),
        },
    )


def _other_trackers(config: Config) -> list[Destination]:
    keys, folder = config.tracking, Path(config.run.dir)
    found: list[Destination] = [EventFiles(folder)] if keys.tensorboard else []
    if keys.wandb is not None:
        tree = config.as_written.model_dump(mode="json")
        found.append(WeightsAndBiases(folder, tree, keys.wandb, keys.experiment, config.run_name))
    return found


def open_watch(process: Process, world: World, tracker: Tracker | None, assigned: Assignment) -> Watch | None:
    """Return rank 0's watch over all ranks' rows; None on other ranks."""
    if not world.is_leader:
        return None
    config, term = process.plan.config, world.term

    def host_of(rank: int) -> str | None:
        return process.files.ask(lambda: host_in(config.run.dir, term, rank), None)

    keys = config.monitoring
    num_lanes = world.mesh.num_lanes(assigned)
    every, actions = PHASES_EVERY_STEPS, keys.on_event
    return Watch(world, tracker, process.totals, every, num_lanes, actions, host_of, process.worlds.drop)


def open_memory_watch(process: Process, world: World, gradients: GradientSum) -> MemoryWatch:
    held = partial(held_by, process.state, gradients, process.save_memory)
    page = None if process.page is None else process.page.facts
    return MemoryWatch(process.meter, held, world.history, PHASES_EVERY_STEPS, page)


def open_tracer(config: Config, world: World, clock: StepClock, step: int) -> Tracer | None:
    """Return this rank's tracer; None if it is not to be traced, which is the default."""
    keys, rank = config.profile, world.group.rank
    if not keys.at_steps or (keys.ranks != "all" and rank not in keys.ranks):
        return None
    tracer = Tracer(keys, config.run.dir, rank=rank, term=world.term, clock=clock, group=world.group)
    tracer.applied(step)
    return tracer


def open_page(config: Config, utilisation: Utilisation | None) -> Page | None:
    """Serve the node's Prometheus page, if configured, in a node's first process."""
    keys = config.monitoring
    if keys.address is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    page = Page(Facts(utilisation=utilisation), config.run_name, socket.gethostname())
    host, port = keys.address
    page.open(host, port)
    if page.port is not None:
        log.warning("metrics for Prometheus: http://%s:%d/metrics", host, page.port)
    return page
