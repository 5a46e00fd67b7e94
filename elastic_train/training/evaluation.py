"""Validation over all ranks: each sample once, with bit-identical results at any world size.

The validation set is split into the run's lanes in file order. Losses are summed by lane and then along the lanes'
tree. Metric states are integers: counts, which add exactly, or lists of rows, which are sorted. Random numbers are
seeded per micro-batch, by its position.

A value without any target is None: it is never the best, and early stopping ignores it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from elastic_train.checkpoint.commits.record import improvement_for
from elastic_train.config.recipe import parse_best
from elastic_train.core.lanes import tree_sum
from elastic_train.core.mesh import Mesh
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.job.cells.stage import Stage
from elastic_train.job.state_shards import StateShards
from elastic_train.job.units.generators import seed_validated
from elastic_train.parallel.devices.switches import TrainingModes
from elastic_train.parallel.group import Group
from elastic_train.system.failpoints import reach
from elastic_train.tasks.preparing import check_states, details_of, value_of
from elastic_train.tasks.task import OWN_VALUES, LaneLoss, Task, mean_loss, on_device, weight_of
from elastic_train.training.session import Session
from elastic_train.training.step_sums import gather_tables

if TYPE_CHECKING:
    from torchmetrics import Metric

log = logging.getLogger(__name__)


class Judged(NamedTuple):
    """The value of a metric, an optional remark about it, and further values by name."""

    value: float
    remark: str | None
    details: Mapping[str, float]


class Ranks(Protocol):
    """The ranks that evaluate, and those that own lanes; a `World` is one."""

    @property
    def group(self) -> Group:
        """All ranks."""

    @property
    def mesh(self) -> Mesh:
        """The ranks' positions in replicas."""

    @property
    def owners(self) -> Group:
        """One rank of every owner of lanes."""

    @property
    def holders(self) -> Group:
        """All ranks that hold the same part of the state as this one."""


def validate(session: Session, *, is_droppable: bool = False) -> None:
    """Validate over all ranks and record the values; does nothing without a validation set.

    Late requests to leave may drop the passes, but not the exchange of the weights for their averages and back.
    """
    reach("validate")
    mesh = session.world.mesh
    batches = session.plan.feed.validation(mesh.assigned(session.plan.num_lanes)[mesh.owner])
    if batches is None:
        return
    session.world.history.validate(step=session.state.step)
    with session.watchdog.resting():  # the first call in a process imports the metrics, which takes seconds
        higher = {name: metric.higher_is_better for name, metric in session.plan.task.metrics().items()}
    shards, shows = session.state.shards, session.plan.config.validation.weights
    averaged = shards.share.averaged(session.world.holders) if shows == "ema" else contextlib.nullcontext()
    passes = session.leave.droppable() if is_droppable else contextlib.nullcontext()
    with session.buffers.untouched(), averaged, passes:
        values = evaluate(
            session.plan.task,
            session.state.model,
            session.watchdog.beating(session.patiently(batches)),
            shards,
            session.world,
            session.plan.num_lanes,
            session.plan.device,
            session.stage,
            functools.partial(_remark, session),
        )
    _note(session, values)
    if session.tracker is not None:
        better = {"loss": False, **higher}
        session.tracker.log(
            session.state.step,
            {f"validation/{name}": value for name, value in values.items() if value is not None},
            {f"validation/{name}": is_so for name, is_so in better.items() if is_so is not None},
        )
    shown = ", ".join(
        f"{name} is no number" if value is None else f"{name} {value:.4f}"
        for name, value in values.items()
        if name != "samples" and "/" not in name  # values per class are only logged
    )
    session.world.announce(f"validation at step {session.state.step}: {shown}")


def _remark(session: Session, text: str) -> None:
    """Announce a problem of the validation set once."""
    if text not in session.remarks:
        session.remarks.add(text)
        session.world.announce(f"WARNING: data.validation {session.plan.config.data.validation}: {text}")


def _note(session: Session, values: Mapping[str, float | None]) -> None:
    """Store a validation's values, and announce it if early stopping ends training."""
    judged, reached = session.judged, session.state.reached
    improvement = improvement_for(judged, reached.improvement)
    if judged is not None and improvement is not None:
        metric, _ = parse_best(judged.metric)
        improvement = improvement.after(session.state.step, values.get(metric), judged.min_delta)
    session.state.reached = replace(reached, validation=values, improvement=improvement)
    if judged is not None and improvement is not None and session.is_exhausted:
        session.world.announce(
            f"early stopping after step {session.state.step}: {improvement.num_since} validations in a row were not "
            f"better ({judged.metric}) than that of step {improvement.best_step}, {improvement.best}"
        )


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    steps: Iterable[Sequence[LaneBatch]],
    shards: StateShards,
    world: Ranks,
    num_lanes: int,
    device: torch.device,
    stage: Stage | None = None,
    remark: Callable[[str], None] = log.warning,
    metrics: Mapping[str, Metric] | None = None,
) -> dict[str, float | None]:
    """Return {"loss": ..., "samples": ..., metric: ...} over the whole validation set, equal on every rank.

    Without a target, loss and metrics are None; so is an undefined metric. `remark` gets a sentence for each such case.
    A metric is NaN if predictions are. `metrics` are the task's, for callers that need more than their values.

    In a pipeline only the last stage knows the losses, and it sends the results to the others.
    """
    cut = stage if stage is not None and stage.is_cut else None
    metrics = {name: metric.to(device) for name, metric in (metrics or task.metrics()).items()}
    sums: dict[int, list[float]] = {}
    with losses(task, model, steps, shards, world, device, cut) as each:
        for batch, loss in each:
            row = sums.setdefault(batch.lane, [0.0, 0.0, 0.0, 0.0])
            if loss is None:
                continue
            row[0] += float(loss.total.detach())
            row[1] += weight_of(loss)
            row[2] += len(batch.ids)
            row[3] += _has_nan(loss.predictions)
            with _plain_kernels():
                for metric in metrics.values():
                    metric.update(loss.predictions, loss.targets)
    table = gather_tables(world.group, world.mesh, world.mesh.assigned(num_lanes), sums).lanes
    total, weight, samples, num_nan = (tree_sum([row[place] for row in table]) for place in range(4))
    mean = mean_loss(total, weight)
    judged = _merge(metrics, world.owners, is_nan=num_nan > 0)
    if cut is not None:
        judged = _told(world, judged)
    if mean is None:
        remark("no sample of the validation set has a target: its loss and metrics are no numbers, and decide nothing")
        return {**dict(zip(OWN_VALUES, (None, samples), strict=True)), **dict.fromkeys(judged)}
    found: dict[str, float | None] = dict(zip(OWN_VALUES, (mean, samples), strict=True))
    for name, (value, text, details) in judged.items():
        found[name] = value
        if math.isnan(value) and not num_nan and math.isfinite(mean):
            remark(f"the metric '{name}' is undefined for the targets of the validation set: it decides nothing")
            found[name] = None
        elif text is not None:
            remark(f"the metric '{name}': {text}")
        found |= details
    return found


@contextlib.contextmanager
def losses(
    task: Task,
    model: nn.Module,
    steps: Iterable[Sequence[LaneBatch]],
    shards: StateShards,
    world: Ranks,
    device: torch.device,
    cut: Stage | None = None,
) -> Iterator[Iterator[tuple[LaneBatch, LaneLoss | None]]]:
    """Yield each micro-batch and its loss, None without samples, with the model in eval mode.

    `cut` is this rank's pipeline stage; only the last stage yields losses.
    """
    modes, was_training = TrainingModes(model), model.training
    model.eval()
    try:
        turns: Iterator[LaneBatch] = (batch for step in steps for batch in step)
        experts = shards.cut.experts
        if experts and shards.table.cell.stage == 1:  # pipeline stages agree as they go
            turns = experts[0].turns(turns)
        turns = shards.share.turns(world.holders, turns)
        with torch.no_grad():
            yield _losses(task, model, turns, device) if cut is None else cut.losses(turns, device)
    finally:
        model.train(was_training)
        modes.set_back()


def _has_nan(predictions: Tensor | None) -> bool:
    return predictions is not None and predictions.is_floating_point() and bool(predictions.isnan().any())


def _losses(
    task: Task, model: nn.Module, batches: Iterable[LaneBatch], device: torch.device
) -> Iterator[tuple[LaneBatch, LaneLoss | None]]:
    """Yield the loss of each lane, None without samples."""
    for batch in batches:
        tensors = batch.tensors
        seed_validated(batch)
        yield batch, None if tensors is None else task.loss(model, on_device(tensors, device))


def _told(world: Ranks, judged: dict[str, Judged]) -> dict[str, Judged]:
    """Return the values from the rank that knows its cell's losses."""
    first = world.mesh.replica * world.mesh.cell.size
    by_rank = world.group.all_gather_objects(judged)
    found: dict[str, Judged] = by_rank[first + world.mesh.cell.speaker]
    return found


@contextlib.contextmanager
def _plain_kernels() -> Iterator[None]:
    """Leave deterministic mode: counts are exact in any order, and deterministic bincount takes quadratic memory."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def _merge(metrics: Mapping[str, Metric], owners: Group, *, is_nan: bool) -> dict[str, Judged]:
    """Merge the metric states of all lane owners and compute the values; NaN if predictions are."""
    judged: dict[str, Judged] = {}
    for name, metric in metrics.items():
        check_states(name, metric)
        for state_name, state in metric.metric_state.items():
            if isinstance(state, Tensor):
                owners.all_reduce(state)
            setattr(metric, state_name, state if isinstance(state, Tensor) else [_all_rows(state, owners)])
        if is_nan:
            judged[name] = Judged(math.nan, None, {})
            continue
        value = value_of(name, metric)
        more = {} if math.isnan(value) else details_of(name, metric)
        judged[name] = Judged(value, getattr(metric, "remark", None), more)
    return judged


def _all_rows(parts: Sequence[Tensor], owners: Group) -> Tensor:
    """Return the rows of all owners, in ascending order."""
    own = torch.cat([part.cpu().long() for part in parts]) if parts else torch.zeros(0, dtype=torch.int64)
    shapes = owners.all_gather_objects(list(own.shape))
    longest = max(shapes, key=lambda shape: (len(shape), shape))
    room = torch.zeros([max(1, longest[0]), *longest[1:]], dtype=torch.int64)
    if own.numel():
        room[: len(own)] = own
    gathered = owners.all_gather(room)
    rows = torch.cat([part[: shape[0]] for part, shape in zip(gathered, shapes, strict=True)])
    if rows.dim() == 1:
        return rows.sort().values
    for column in reversed(range(rows[0].numel() if len(rows) else 0)):
        rows = rows[rows.flatten(1)[:, column].argsort(stable=True)]
    return rows
