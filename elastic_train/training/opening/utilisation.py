"""Count the FLOPs per sample at process start, for MFU; skipped if the device's peak is unknown.

It counts one forward pass without gradients; a backward pass takes as much for the inputs, and as much again for the
trained weights.
"""

from __future__ import annotations

import contextlib
import logging

import torch
from torch import Tensor, nn

from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.insight.utilisation import Utilisation
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState
from elastic_train.job.units.blocks import unit_names
from elastic_train.job.warm_up import unchanged
from elastic_train.system.wording import first_line
from elastic_train.tasks.task import Deferring

log = logging.getLogger(__name__)


def peak_of(plan: Plan) -> float | None:
    """Return the peak FLOP/s of this process's GPU by its name; None if unknown, and for a CPU."""
    if plan.device.type != "cuda":
        return None
    from elastic_train.planning.arithmetic.catalogue import device_named  # not needed on a CPU

    known = device_named(torch.cuda.get_device_name(plan.device))
    return None if known is None else known.peak_flops(plan.config.precision)


def count(plan: Plan, state: AppliedState, batch: LaneBatch, peak_flops: float | None) -> Utilisation | None:
    """Count the FLOPs of a micro-batch's samples; None without samples or a peak, or if the forward pass fails.

    If the weights are not in memory yet, the task's sketch runs on the meta device.
    """
    if batch.tensors is None or peak_flops is None:
        return None
    devices = [plan.device] if plan.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            forward, of_blocks = _forward_flops(plan, state, batch.tensors)
    except Exception as error:  # noqa: BLE001 - a model may raise anything; if training fails too, it reports the error
        log.info("MFU is unknown: the FLOPs of a sample cannot be counted: %s", first_line(error))
        return None
    parameters = list(state.model.parameters())
    trained = sum(one.numel() for one in parameters if one.requires_grad) / max(1, sum(map(torch.numel, parameters)))
    num_samples = len(batch.ids)
    again = of_blocks if plan.config.parallel.recompute == "units" else 0.0
    flops = forward * (2 + trained)
    return Utilisation(flops / num_samples, again / num_samples, peak_flops) if flops else None


def _forward_flops(plan: Plan, state: AppliedState, batch: dict[str, Tensor]) -> tuple[float, float]:
    """Return the FLOPs of a forward pass of a micro-batch, and the part of them in blocks."""
    from elastic_train.planning.tracing import REST, Trace  # imported only if a peak is known

    model, device = (
        (state.model, plan.device) if state.shards.cut.has_weights else (_sketch(plan), torch.device("meta"))
    )
    given = {name: tensor.to(device) for name, tensor in batch.items()}
    names = unit_names(model)
    trace = Trace(model, names, [*model.parameters(), *model.buffers(), *given.values()])
    with contextlib.ExitStack() as inside:
        if device == plan.device:
            inside.enter_context(unchanged(model))
            inside.enter_context(plan.autocast())
        inside.enter_context(torch.no_grad())
        inside.enter_context(trace.watching())
        plan.task.loss(model, given)
    of_blocks = sum(unit.forward.flops for name, unit in trace.units.items() if name != REST)
    return of_blocks + trace.units[REST].forward.flops, of_blocks


def _sketch(plan: Plan) -> nn.Module:
    """Return the task's model on the meta device."""
    sketch = plan.task.sketch_model() if isinstance(plan.task, Deferring) else None
    assert sketch is not None, "weights are deferred by such a task alone"
    return sketch.to("meta").train()
