"""Warming up: what a process pays once in its first step, it pays before it enters a world: nobody waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from elastic_train.core.lanes import lane_seed
from elastic_train.core.order import Cursor
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.errors import DataError, StorageError
from elastic_train.job.cells.cell_state import CellState
from elastic_train.job.cells.context import lone_part
from elastic_train.job.generators import seed_generators
from elastic_train.job.plan import Plan
from elastic_train.job.sharded.held_state import HeldState
from elastic_train.job.state import AppliedState
from elastic_train.job.units.compiled import CALLS
from elastic_train.tasks.preparing import try_metrics
from elastic_train.tasks.task import Batch, LaneLoss, Sequencing, weight_of

if TYPE_CHECKING:
    from torchmetrics import Metric


def warm_up(plan: Plan, state: AppliedState) -> None:
    """Run forward and backward of one micro-batch, and import the metrics; the state stays as it is, bit for bit.

    Opens the data, loads kernels, and starts the autograd engine's threads. Data that cannot be read is left to the
    step that needs it, which says what to do; but where the model is compiled, which is for the shape of the run's
    first micro-batch, DataError or StorageError is raised. Without weights nothing is computed.
    """
    metrics = plan.task.metrics()
    try_metrics(metrics, None)
    try:
        [[batch]] = plan.feed.training(plan.order, range(1), Cursor(), num_steps=1)
    except (DataError, StorageError):
        if state.compiled is None:
            return
        raise
    if state.compiled is not None and batch.unreadable:
        raise DataError(
            "compile: the run's first micro-batch cannot be read, whose shape is what is compiled: restore its files, "
            "or set compile to false, on all nodes"
        )
    if isinstance(state.shards, HeldState) and not state.shards.has_weights:
        return
    if isinstance(state.shards, CellState) and not state.shards.cut.has_weights:
        return
    devices = [plan.device] if plan.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _unchanged(state.model), state.shards.recording(), _compiling(state):
        loss = run_once(plan, state.model, batch, step=0)
        if loss is not None and plan.config.data.validation is not None:
            _try_metrics(plan, metrics, loss)


def _try_metrics(plan: Plan, metrics: Mapping[str, Metric], loss: LaneLoss) -> None:
    """Refuse metrics that the first validation could not compute of predictions such as a loss's."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")  # as in a validation
    try:
        with torch.no_grad():
            try_metrics({name: metric.to(plan.device) for name, metric in metrics.items()}, loss)
    finally:
        torch.set_deterministic_debug_mode(mode)


@contextlib.contextmanager
def _compiling(state: AppliedState) -> Iterator[None]:
    """Compile what runs inside, and describe it for comparison with other ranks; if anything is to be compiled."""
    if state.compiled is None:
        yield
        return
    with state.compiled.learning():
        yield
    state.outline = {**state.outline, CALLS: state.compiled.described()}


def run_once(plan: Plan, model: nn.Module, batch: LaneBatch, step: int) -> LaneLoss | None:
    """Run forward and backward of one micro-batch as a step does, outside of any world; nothing without samples."""
    if batch.tensors is None:
        return None
    seed_generators(lane_seed(plan.config.run.seed, step, batch.lane))
    tensors = {name: tensor.to(plan.device) for name, tensor in batch.tensors.items()}
    with plan.autocast():
        loss = _loss_alone(plan, model, tensors)
    weight_of(loss)
    torch.autograd.backward(loss.total)
    return loss


def _loss_alone(plan: Plan, model: nn.Module, tensors: Batch) -> LaneLoss:
    """Compute a loss without peers: of a part of each row where they compute the rest, as all might not fit."""
    if (degree := plan.config.parallel.context) == 1:
        return plan.task.loss(model, tensors)
    assert isinstance(plan.task, Sequencing), "it was checked"
    return plan.task.loss_of_part(model, tensors, lone_part(degree))


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Take back what a forward and a backward pass change: buffers, and gradients, each as soon as it is there."""
    kept = [buffer.clone() for buffer in model.buffers()]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(_forget_gradient) for parameter in trained]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None
