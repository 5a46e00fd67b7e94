"""Bugs planted in the product itself, in the training processes, to test the verdict on real runs.

Each is invisible on one rank without faults, so the fault-free run on one rank gives the correct result. The first
three are also invisible to the counting model, whose sums are integers and whose optimizer has no state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from chaos.tasks.paced_classifier import PacedClassifier
from elastic_train.checkpoint.format.layout import State
from elastic_train.core import lanes
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.health.precheck import Proof
from elastic_train.job.state import AppliedState, StepFacts, TrainProgress
from elastic_train.parallel import exchange
from elastic_train.parallel.point_to_point import PointToPoint
from elastic_train.training import commits, step
from elastic_train.training.session import Session
from elastic_train.training.step import ForwardOutput
from rendezvous.etcd import connection


class BuggyClassifier(PacedClassifier):
    """The paced classifier, in a process where the product has the planted bug `plant`, a name in `BUGS`."""

    def __init__(self, plant: str, **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        if plant not in BUGS:
            raise ValueError(f"no bug '{plant}'; there are {', '.join(BUGS)}")
        BUGS[plant]()


def wrong_tree() -> None:
    """Reduce partial sums of 4 or 8 ranks in another order: distant ranks first, siblings last."""

    def halve_in_another_order(flat: Tensor, group: PointToPoint, scratch: exchange.Scratch) -> None:
        all_of_it = [flat.clone() if rank == group.rank else torch.empty_like(flat) for rank in range(group.size)]
        others = [rank for rank in range(group.size) if rank != group.rank]
        group.exchange([(rank, all_of_it[group.rank]) for rank in others], [(rank, all_of_it[rank]) for rank in others])
        sums = torch.stack(all_of_it)
        half = group.size // 2
        while half:
            sums = sums[:half] + sums[half:]
            half //= 2
        flat.copy_(sums[0])

    exchange.halve_and_double = halve_in_another_order


def rank_seeded_dropout() -> None:
    """Seed the random numbers of a forward pass by rank instead of by lane."""
    forward, rank = step._forward, [0]

    def run_on_rank(session: Session, batch: LaneBatch, chunk: int, given: Tensor | None) -> ForwardOutput:
        rank[0] = session.world.group.rank
        return forward(session, batch, chunk, given)

    def seed_of_rank(seed: int, number: int, lane: int) -> int:
        return lanes.lane_seed(seed, number, rank[0])

    step._forward = run_on_rank
    vars(step)["lane_seed"] = seed_of_rank


def moments_not_handed_over() -> None:
    """Restore only weights from a rank or a commit: AdamW's moments restart from zero."""
    restore = AppliedState.restore

    def restore_weights(
        state: AppliedState, fill: Callable[[State], None], reached: TrainProgress, *, keeps_rates: bool = False
    ) -> None:
        restore(state, fill, reached, keeps_rates=keeps_rates)
        for moments in state.optimizer.state.values():
            moments["exp_avg"].zero_()
            moments["exp_avg_sq"].zero_()

    AppliedState.restore = restore_weights  # type: ignore[method-assign, assignment]


def compares_nothing() -> None:
    """Skip the check that all ranks have the same weights."""
    vars(commits)["check_same_weights"] = lambda group, weights, step: None


def applies_no_number() -> None:
    """Apply a step whose loss is NaN, which makes all weights NaN."""
    apply = AppliedState.apply

    def apply_all_the_same(state: AppliedState, facts: StepFacts, norm: Tensor) -> None:
        state.config = state.config.model_copy(update={"on_nonfinite": "keep"})
        apply(state, facts, norm)

    AppliedState.apply = apply_all_the_same  # type: ignore[method-assign, assignment]


def lets_the_unfit_in() -> None:
    """Let a worker join regardless of its machine's health check."""
    Proof.demand = lambda self, is_stopped: None  # type: ignore[method-assign]


def reads_certificates_once() -> None:
    """Read etcd's certificates only once per process, so that renewed ones are ignored."""
    vars(connection)["_read_from_disk"] = lru_cache(connection._read_from_disk)


BUGS: dict[str, Callable[[], None]] = {
    "wrong-tree": wrong_tree,
    "rank-seeded-dropout": rank_seeded_dropout,
    "moments-not-handed-over": moments_not_handed_over,
    "compares-nothing": compares_nothing,
    "applies-no-number": applies_no_number,
    "lets-the-unfit-in": lets_the_unfit_in,
    "reads-certificates-once": reads_certificates_once,
}
