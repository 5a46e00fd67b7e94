"""Warm-up: do the one-time work of a first step before the process joins a world, where peers would wait."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from elastic_train.core.lanes import lane_seed
from elastic_train.core.order import Cursor
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.errors import ConfigError, DataError, StorageError
from elastic_train.job.cells.stage import lone_part
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState
from elastic_train.job.units.blocks import comparing_blocks, recording_order, same_bits
from elastic_train.job.units.compiled import CALLS
from elastic_train.job.units.float8 import check_repeats
from elastic_train.job.units.generators import seed_generators
from elastic_train.parallel.attention.choice import Recorder, choose
from elastic_train.parallel.attention.kernels import machine_of, trying_documents, why
from elastic_train.parallel.product_probe import Recorder as ProductRecorder
from elastic_train.tasks.placements import Running, loss_of
from elastic_train.tasks.preparing import try_metrics
from elastic_train.tasks.task import Batch, LaneLoss, Task, on_device, sketch_of, weight_of

if TYPE_CHECKING:
    from torchmetrics import Metric

log = logging.getLogger(__name__)
FIRST_LOSS = "first loss"
MOST_TO_REPEAT_S = 1.0
"""Longest first pass (forward and backward), in seconds, that is repeated."""


def warm_up(plan: Plan, state: AppliedState, look: Callable[[LaneBatch], None] = lambda _: None) -> None:
    """Run forward and backward of one micro-batch, and import the metrics; the state stays bit-identical.

    Opens the data, loads kernels, and starts the autograd engine's threads. Unreadable data is left to the step that
    needs it; but a compiled model needs the run's first micro-batch, so DataError or StorageError is raised. Computes
    nothing if the model has no weights yet. `look` is called with the micro-batch before kernels are chosen.
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
    look(batch)
    devices = [plan.device] if plan.device.type == "cuda" else []
    is_exact = plan.config.reduction == "canonical"
    if is_exact and devices:
        with torch.random.fork_rng(devices):
            choose_attention(plan, state, batch)
    if not state.shards.cut.has_weights:
        return
    with torch.random.fork_rng(devices), _compiling(state):
        if state.shards.table.gathers_by_unit and batch.tensors is not None:
            with unchanged(state.model), torch.no_grad(), recording_order(state.model, state.shards.order):
                _loss_of(plan, state.model, batch, step=0)
        began = time.monotonic()
        comparing = comparing_blocks() if is_exact else contextlib.nullcontext()
        with unchanged(state.model), comparing:
            loss = run_once(plan, state.model, batch, step=0)
        if loss is not None and is_exact and time.monotonic() - began < MOST_TO_REPEAT_S:
            with unchanged(state.model):
                _check_repeats(plan, state.model, loss, lambda: _loss_of(plan, state.model, batch, step=0))
        if loss is not None and plan.config.data.validation is not None:
            _try_metrics(plan, metrics, loss)


def choose_attention(plan: Plan, state: AppliedState, batch: LaneBatch) -> None:
    """Choose the fastest attention kernel with reproducible bits for such micro-batches; check products in float8.

    Blocks to be compiled run uncompiled in this pass without gradients. Without weights the model runs on the meta
    device, where a model whose pass depends on values fails: then nothing is chosen.
    """
    if batch.tensors is None:
        return
    asked, products = Recorder(plan.compute_type), ProductRecorder()
    with torch.no_grad(), trying_documents(), asked, products:
        if state.shards.cut.has_weights:
            with unchanged(state.model), state.shards.cut.without_peers():
                _loss_of(plan, state.model, batch, step=0)
        else:
            try:
                plan.task.loss(meta_model(plan), on_device(batch.tensors, torch.device("meta")))
            except Exception as error:  # noqa: BLE001 - a model may raise anything
                log.warning(
                    "attention is computed by torch, and packed rows with a mask, since the model does not run without "
                    "weights (%s)",
                    why(error),
                )
                return
    check_repeats(products.calls, plan.device)
    choose(asked.calls, machine_of(plan.device, compiles=state.compiled is not None))


def meta_model(plan: Plan) -> nn.Module:
    """Return the model of a run whose weights are deferred, on the meta device."""
    sketch = sketch_of(plan.task)
    assert sketch is not None, "weights are deferred by such a task alone"
    return sketch.to("meta").train()


class FirstLoss:
    """The first loss of a process that has not warmed up; computed twice if that is quick.

    A loss must be reproducible from weights, samples and seeds, or worlds and resumes would diverge.
    """

    def __init__(self, plan: Plan, model: nn.Module, *, tries_metrics: bool) -> None:
        self._plan, self._model, self._tries_metrics = plan, model, tries_metrics
        self._began, self._buffers = 0.0, list[Tensor]()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Compute the first loss within this context."""
        self._began, self._buffers = time.monotonic(), [buffer.clone() for buffer in self._model.buffers()]
        with comparing_blocks():
            yield

    def check(self, first: LaneLoss, again: Callable[[], LaneLoss]) -> None:
        """Compute the loss again after its backward pass; raise ConfigError if it differs, or if metrics fail on it."""
        if time.monotonic() - self._began < MOST_TO_REPEAT_S:
            left = [buffer.clone() for buffer in self._model.buffers()]
            _put(self._model, self._buffers)
            _check_repeats(self._plan, self._model, first, again)
            _put(self._model, left)
        if self._tries_metrics and self._plan.config.data.validation is not None:
            _try_metrics(self._plan, self._plan.task.metrics(), first)


def _check_repeats(plan: Plan, model: nn.Module, first: LaneLoss, again: Callable[[], LaneLoss]) -> None:
    before = _numbers(plan.task, model)
    second = again()
    after = _numbers(plan.task, model)
    if changed := [name for name, value in after.items() if value != before.get(name)]:
        log.warning(
            "%s changes as a loss is computed, and no commit holds it: another world, or a process that resumes the "
            "run, has another value. Where losses depend on it, keep it in a buffer of the model",
            changed[0],
        )
    is_same = same_bits(first.total, second.total) and repr(weight_of(first)) == repr(weight_of(second))  # or both NaN
    if not is_same:
        raise ConfigError(
            f"task.path: '{plan.config.task.path}': its first loss is {first.total.item()}, and {second.total.item()} "
            "when it is computed again from the same weights and seeds: a generator of the task's or the model's own, "
            "a counter, or a clock decides it, so every world and resume would have other weights. Draw from the "
            "global generators of torch, numpy and Python, which are seeded for each lane, and keep what changes in "
            "buffers; or set reduction to fast"
        )


def _put(model: nn.Module, values: Sequence[Tensor]) -> None:
    """Restore the values of a model's buffers; one that has its value is not written, or would count as changed."""
    for buffer, value in zip(model.buffers(), values, strict=True):
        if buffer.layout is not torch.strided or not same_bits(buffer, value):
            buffer.copy_(value)


def _numbers(task: Task, model: nn.Module) -> dict[str, float]:
    """Return the numeric attributes of a task and of a model's modules, by location."""
    owners = [("the task", task), *((f"module '{name}'", module) for name, module in model.named_modules())]
    return {
        f"attribute '{key}' of {where}": value
        for where, owner in owners
        for key, value in vars(owner).items()
        if type(value) in (int, float)
    }


def _try_metrics(plan: Plan, metrics: Mapping[str, Metric], loss: LaneLoss) -> None:
    """Refuse metrics that would fail on a validation's predictions, tried on this loss."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")  # as in a validation
    try:
        with torch.no_grad():
            try_metrics({name: metric.to(plan.device) for name, metric in metrics.items()}, loss)
    finally:
        torch.set_deterministic_debug_mode(mode)


@contextlib.contextmanager
def _compiling(state: AppliedState) -> Iterator[None]:
    """Compile the code that runs inside, if `compile` is on, and describe it for comparison with other ranks.

    A tensor-parallel rank compiles with its cut matrices.
    """
    if state.compiled is None:
        yield
        return
    with state.shards.cut.without_peers(), state.compiled.learning():
        yield
    state.outline = {**state.outline, CALLS: state.compiled.described()}


def run_once(plan: Plan, model: nn.Module, batch: LaneBatch, step: int) -> LaneLoss | None:
    """Run forward and backward of one micro-batch as a step does, outside any world; does nothing without samples."""
    if batch.tensors is None:
        return None
    loss = _loss_of(plan, model, batch, step)
    weight_of(loss)
    torch.autograd.backward(loss.total)
    return loss


def _loss_of(plan: Plan, model: nn.Module, batch: LaneBatch, step: int) -> LaneLoss:
    assert batch.tensors is not None, "the lane has samples"
    seed_generators(lane_seed(plan.config.run.seed, step, batch.lane))
    tensors = on_device(batch.tensors, plan.device)
    with plan.autocast():
        return _loss_alone(plan, model, tensors)


def _loss_alone(plan: Plan, model: nn.Module, tensors: Batch) -> LaneLoss:
    """Compute a loss without peers; under context parallelism only of part of each row, as whole rows might not fit."""
    parallel = plan.config.parallel
    if parallel.context == 1:
        return plan.task.loss(model, tensors)
    assert isinstance(plan.task, Running), "it was checked"
    return loss_of(plan.task, model, tensors, lone_part(parallel.context, parallel.token_multiple))


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Undo the changes of forward and backward passes: restore buffers, and drop each gradient at once."""
    kept = [buffer.clone() for buffer in model.buffers()]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(_forget_gradient) for parameter in trained]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        _put(model, kept)


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None
