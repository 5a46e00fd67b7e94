"""What is simulated: a job and its surroundings, and the plan that the product makes of it."""

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
"""What trains a tiny model: some steps' gradients are clipped, and others' not. Everything decays, in vectors of three
kinds."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What runs: the job and its surroundings; times are virtual seconds."""

    nodes: int = 3
    ranks: int = 1
    min_nodes: int = 1
    spares: int = 0
    """How many of the nodes are more than the job may have at once: they wait until another is lost."""
    lanes: int = 6
    micro_batch: int = 4
    rows: tuple[int, ...] = (40, 7, 30, 24)
    epochs: int = 3
    commit_every: int = 5
    keep_last: int = 3
    least_part_bytes: int = 1
    """The modelled state has some bytes only: as many ranks write parts of it as it has tensors, or rank 0 alone."""
    lane_s: float = 0.1
    warm_s: float = 3.0
    ttl_s: float = 3.0
    peer_timeout_s: float = 60.0
    delay_s: float = 0.003
    piece_s: float = 0.0
    """How long a mirror of etcd is busy with what it has heard before it hears of more."""
    look_s: float = 1.0
    """The longest that a wait goes without looking again, whatever the watch says."""
    recovery: Recovery = "live"
    max_restarts: int = 10
    """How often a node restarts workers for failures of its own: in `live` mode by each cause, an hour."""
    unreadable: Literal["fail", "quarantine"] = "fail"
    """What a job does about a row group that cannot be read."""
    tracked: bool = False
    """Whether its metrics are sent to a tracker."""
    vectors: bool = False
    """Whether its lanes have short vectors that the product's own exchange sums, not only the simulator's."""
    device: bool = False
    """Whether these vectors are on devices, whose exchanges end some time after they were asked for."""
    copies: int = 0
    """In how many copies the state of a real, tiny model is held, in shards; 0 where the state is modelled. In cells
    that is what the optimizer keeps of each place's part."""
    shards: Shards = "optimizer"
    """What of that state is in shards."""
    cell: int = 1
    """How many workers hold the state together, each a part of it."""
    stages: int = 1
    """In how many stages these are; the workers of one are of one node, and stages may be of different ones."""
    is_whole: bool = False
    """Whether every rank holds all of the state all the same, as where nothing is sharded, or in parts."""

    @property
    def max_nodes(self) -> int:
        """The most that a world may have, as --nnodes has it."""
        return self.nodes - self.spares

    @property
    def num_replicas(self) -> int:
        """How many there are if nothing is wrong: ranks, or cells."""
        return self.max_nodes * self.ranks if self.is_whole else self.cells_of([self.ranks] * self.max_nodes)

    def cells_of(self, workers: Iterable[int]) -> int:
        """Return how many cells nodes of so many workers make."""
        return sum(number // (self.cell // self.stages) for number in workers) // self.stages

    @property
    def total_steps(self) -> int:
        return self.epochs * order_of(self.rows, self.lanes, 1, self.micro_batch).num_steps(self.micro_batch)

    @property
    def step_s(self) -> float:
        """About how long a step takes."""
        return self.lane_s * -(-self.lanes // self.num_replicas)

    @property
    def patience_s(self) -> float:
        """How long a fault that is over may still have consequences.

        Leases end, peers are waited for, saves are given up, nodes are started again, and some steps pass.
        """
        return 300.0 + 2 * self.ttl_s + self.peer_timeout_s + 5 * self.step_s

    @property
    def recovery_s(self) -> float:
        """How long it takes until the next step is applied after a fault, if no other comes."""
        return 2 * self.ttl_s + self.warm_s + 2 * self.step_s

    @property
    def span_s(self) -> float:
        """About how long the job takes without faults."""
        return self.warm_s + 3.0 + self.total_steps * self.lane_s * -(-self.lanes // self.num_replicas)


def make_plan(
    shape: Shape,
    data: Dataset,
    take_witness: Callable[[Int64s], None],
    take_state: Callable[[ModelledState | AppliedState], None],
) -> ModelledPlan:
    """Return what `elastic_train.job.plan.make_plan` would; `take_witness` gets the counts of a job that is done.

    `take_state` gets what every process builds.
    """
    parallel: dict[str, object] = {}
    if shape.cell > 1 and not shape.is_whole:
        parallel = {"tensor": shape.cell // shape.stages, "pipeline": shape.stages}
    special: dict[str, object] = {"parallel": parallel}
    if shape.copies:
        shards = "none" if shape.is_whole else shape.shards
        # Nothing is differentiated here, so nothing can be exchanged beside it.
        parallel |= {"shards": shards, "copies": shape.copies, "bucket_mb": None}
        special["optimizer"] = TINY_OPTIMIZER
    config = Config.model_validate(
        {
            "run": {"dir": "sim", "seed": 1},
            "data": {"train": "sim://data", "quarantine": ["unreadable"] if shape.unreadable == "quarantine" else []},
            "batch": {"global_batch": shape.lanes * shape.micro_batch, "micro_batch": shape.micro_batch},
            "epochs": shape.epochs,
            "validation": {"every_steps": None},
            "checkpoint": {"every_steps": shape.commit_every, "every_s": None, "keep_last": shape.keep_last},
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
