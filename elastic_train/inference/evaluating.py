"""Evaluate a trained model on any dataset in one process, bit-identical to a validation during training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_train.core.mesh import Mesh
from elastic_train.inference.opening import Trained
from elastic_train.parallel.group import Group
from elastic_train.system.progress_bar import Track, silent
from elastic_train.training.evaluation import Ranks, evaluate
from elastic_train.training.open_session import make_repeatable

if TYPE_CHECKING:
    from torchmetrics import Metric

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Alone:
    """A world of one rank."""

    group: Group
    mesh: Mesh = Mesh(0, 1)  # noqa: RUF009 - frozen

    @property
    def owners(self) -> Group:
        return self.group

    @property
    def holders(self) -> Group:
        return self.group


def alone() -> Ranks:
    return Alone(Group(0, 1, None, _TIMEOUT_S))


def evaluate_trained(
    trained: Trained, metrics: Mapping[str, Metric] | None = None, track: Track = silent
) -> dict[str, float | None]:
    """Return loss, number of samples and the task's metrics over the validation set of `trained`.

    `metrics` are the task's own; they hold their states afterwards.
    """
    plan, state = trained.plan, trained.state
    make_repeatable(plan.config)
    batches = plan.feed.validation(range(plan.num_lanes))
    assert batches is not None, "it was opened with a validation set"
    steps = track(batches, "evaluating", plan.feed.num_validation_steps, "steps")
    found = plan.task, state.model, steps, state.shards, alone(), plan.num_lanes, plan.device
    return evaluate(*found, metrics=metrics)
