"""A job and its surroundings, and the product's plan for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from chaos.sim.machine.tracker import URI
from chaos.sim.modelled.plan import ModelledManifest, ModelledPlan, ModelledTask
from chaos.sim.modelled.state import ModelledState
from chaos.sim.modelled.training_data import Dataset, ModelledFeed, order_of
from elastic_train.config.schema import Config
from elastic_train.core.arrays import Int64s
from elastic_train.job.state import AppliedState

Recovery = Literal["live", "restart"]
Shards = Literal["optimizer", "gradients", "parameters"]

TINY_OPTIMIZER = {"lr": 0.01, "clip_norm": 64.0, "warmup_steps": 2, "decay_norms_and_biases": True}
"""Optimizer settings of the tiny model: some steps' gradients are clipped, others not; all parameters decay, in vectors
of three kinds."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A job and its surroundings; times are virtual seconds."""

    nodes: int = 3
    ranks: int = 1
    min_nodes: int = 1
    spares: int = 0
    """Number of nodes beyond the job's maximum: they wait until another is lost."""
    lanes: int = 6
    micro_batch: int = 4
    rows: tuple[int, ...] = (40, 7, 30, 24)
    epochs: int = 3
    commit_every: int = 5
    keep_last: int = 3
    least_part_bytes: int = 1
    """Bytes from which state is split between writers. The modelled state is tiny: 1 gives as many writers as tensors,
    a large value leaves all to rank 0."""
    lane_s: float = 0.1
    warm_s: float = 3.0
    ttl_s: float = 3.0
    peer_timeout_s: float = 60.0
    delay_s: float = 0.003
    piece_s: float = 0.0
    """Seconds that a mirror of etcd needs for an update before it receives the next."""
    look_s: float = 1.0
    """Longest pause between two looks of a wait, whatever the watch says."""
    recovery: Recovery = "live"
    max_restarts: int = 10
    """Restart budget of a node for its own failures: in `live` mode per cause and hour."""
    unreadable: Literal["fail", "quarantine"] = "fail"
    """Reaction to an unreadable row group."""
    tracked: bool = False
    """True if metrics are sent to a tracker."""
    vectors: bool = False
    """True if lanes have short vectors that the product's own exchange sums."""
    device: bool = False
    """True if these vectors are on devices, whose exchanges are asynchronous."""
    copies: int = 0
    """Number of copies of a real, tiny model's sharded state; 0: modelled state. With cells, of each parameter shard's
    optimizer state."""
    shards: Shards = "optimizer"
    """Sharded part of that state."""
    cell: int = 1
    """Workers that hold the state together, one parameter shard each."""
    stages: int = 1
    """Stages of a cell; the workers of a stage are on one node, stages may be on different ones."""
    is_whole: bool = False
    """True if every rank holds the whole state nevertheless, as without sharding or model parallelism."""

    @property
    def max_nodes(self) -> int:
        """Most nodes in a world, as in --nnodes."""
        return self.nodes - self.spares

    @property
    def num_replicas(self) -> int:
        """Number of replicas without faults: ranks, or cells."""
        return self.max_nodes * self.ranks if self.is_whole else self.cells_of([self.ranks] * self.max_nodes)

    def cells_of(self, workers: Iterable[int]) -> int:
        """Return how many cells these nodes form, given their numbers of workers."""
        return sum(number // (self.cell // self.stages) for number in workers) // self.stages

    @property
    def total_steps(self) -> int:
        return self.epochs * order_of(self.rows, self.lanes, 1, self.micro_batch).num_steps(self.micro_batch)

    @property
    def step_s(self) -> float:
        """Approximate duration of a step."""
        return self.lane_s * -(-self.lanes // self.num_replicas)

    @property
    def patience_s(self) -> float:
        """Seconds that consequences may outlast a fault.

        Leases expire, peers time out, saves are given up, nodes restart, and some steps pass.
        """
        return 300.0 + 2 * self.ttl_s + self.peer_timeout_s + 5 * self.step_s

    @property
    def recovery_s(self) -> float:
        """Time from a fault to the next applied step, if no other fault follows."""
        return 2 * self.ttl_s + self.warm_s + 2 * self.step_s

    @property
    def span_s(self) -> float:
        """Approximate duration of the job without faults."""
        return self.warm_s + 3.0 + self.total_steps * self.lane_s * -(-self.lanes // self.num_replicas)


def make_plan(
    shape: Shape,
    data: Dataset,
    take_witness: Callable[[Int64s], None],
    take_state: Callable[[ModelledState | AppliedState], None],
) -> ModelledPlan:
    """Return what `elastic_train.job.plan.make_plan` would; `take_witness` gets the counts of a finished job.

    `take_state` gets the state that each process builds.
    """
    parallel: dict[str, object] = {}
    if shape.cell > 1 and not shape.is_whole:
        parallel = {"tensor": shape.cell // shape.stages, "pipeline": shape.stages}
    special: dict[str, object] = {"parallel": parallel}
    if shape.copies:
        shards = "none" if shape.is_whole else shape.shards
        # There is no backward pass here, so no exchange can overlap with it.
        parallel |= {"shards": shards, "copies": shape.copies, "bucket_mb": None}
        special["optimizer"] = TINY_OPTIMIZER
    config = Config.model_validate(
        {
            "run": {"dir": "sim", "seed": 1},
            "data": {"train": "sim://data", "quarantine": ["unreadable"] if shape.unreadable == "quarantine" else []},
            "batch": {"global_batch": shape.lanes * shape.micro_batch, "micro_batch": shape.micro_batch},
            "epochs": shape.epochs,
            "validation": {"every": None},
            "checkpoint": {"every": f"{shape.commit_every} steps", "keep_last": shape.keep_last},
            "peer_timeout_s": shape.peer_timeout_s,
            "tracking": {"mlflow_uri": URI if shape.tracked else None},
            **special,
        }
    )
    return ModelledPlan(
        config=config,
        task=ModelledTask(take_witness),
        manifest=ModelledManifest(np.array(shape.rows, np.int64)),
        order=order_of(shape.rows, shape.lanes, 1, shape.micro_batch),
        feed=ModelledFeed(data, quarantines=shape.unreadable == "quarantine"),
        total_steps=shape.total_steps,
        device=torch.device("cpu"),
        take_state=take_state,
        is_tiny=shape.copies > 0,
        num_parts=shape.cell,
    )
