"""Build the initial state of a run: an optimizer around a model, and the shards that each rank holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from elastic_train.checkpoint.format.layout import AVERAGE
from elastic_train.config.combinations import refused
from elastic_train.config.parallel import ParallelConfig, bucket_bytes
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.mesh import Cell
from elastic_train.errors import ConfigError
from elastic_train.job.cells.cell_plan import CellPlan
from elastic_train.job.cells.cut_model import CutModel
from elastic_train.job.model_layout import Laid, describe_layout, layout_of, store_in_memory_order
from elastic_train.job.optimizers.choice import OptimizerChoice, choose
from elastic_train.job.optimizers.optimizer_memory import OptimizerMemory, names_of
from elastic_train.job.optimizers.parameter_groups import FirstStates, build_groups, describe_groups
from elastic_train.job.optimizers.schedule import rate_factor
from elastic_train.job.sharded.elementwise import Slots, check_types, numbers_of_atomic, slots_of
from elastic_train.job.sharded.share import Share, SharedScaler
from elastic_train.job.sharded.streamed_update import Offload
from elastic_train.job.sharded.zero1_share import Zero1Share
from elastic_train.job.sharded.zero3_share import Zero2Share, Zero3Share
from elastic_train.job.state import AppliedState
from elastic_train.job.state_shards import StateShards
from elastic_train.job.units.blocks import recompute_blocks, unit_names, unit_of
from elastic_train.parallel.cells.links import CellLinks
from elastic_train.parallel.devices.host_memory import host_memory_of
from elastic_train.placement.grains import CutDims
from elastic_train.placement.holdings import Column, column_of
from elastic_train.placement.table import Parts, Table
from elastic_train.system.wording import counted
from elastic_train.tasks.task import ParameterGroup

BY_SEAT: Mapping[str, type[Zero1Share]] = {"optimizer": Zero1Share, "gradients": Zero2Share, "parameters": Zero3Share}

Made = tuple[nn.Module, Optimizer, LambdaLR, SharedScaler]
"""Model, optimizer, learning-rate schedule and loss scaler."""

EVERYWHERE = 1 << 30
"""More copies than ranks, so that every rank holds the whole state; used to offload unsharded state."""


def build_state(
    model: nn.Module,
    config: OptimizerConfig,
    total_steps: int,
    device: str,
    is_fp16: bool,
    groups: Sequence[ParameterGroup] = (),
    parallel: ParallelConfig | None = None,
    cell_plan: CellPlan | None = None,
    dims: CutDims | None = None,
    gathers: torch.dtype | None = None,
) -> AppliedState:
    """Build optimizer, schedule and scaler around a model that is on its device; freeze the parameters in `groups`.

    `cell_plan` says how the ranks of a replica split the model. Without it each rank holds the whole model, and `dims`
    gives the dimension along which any model-parallel degree would cut each parameter. Sharded weights are rounded to
    `gathers` where they are gathered for a pass.

    Raises ConfigError if the groups do not fit the model, or the model cannot be split as `parallel` says.
    """
    parallel = parallel or ParallelConfig(bucket_mb=None)
    least_bytes = bucket_bytes(parallel.bucket_mb, on_cpu=device == "cpu")
    cell_plan = cell_plan or CellPlan(dims=dims or {})
    store_in_memory_order(model, cell_plan.dims)
    recompute_blocks(model, parallel.recompute)
    choice = choose(config, device)
    optimizer, scheduler = optimizer_of(model, config, total_steps, groups, choice)
    if is_fp16:
        _check_scales(model)
    made = model, optimizer, scheduler, SharedScaler(device, enabled=is_fp16)
    slots: list[Slots] = []
    if parallel.has_shares or parallel.cell.holds_parts:
        slots = slots_of(optimizer, choice.make, next(model.parameters()).device)
    cut = CutModel(model, cell_plan, parallel.cell, CellLinks())
    atomic = numbers_of_atomic(slots)
    parts = _parts_of(made, cut, parallel, atomic, config.name)
    outline = {
        "the parameters": describe_layout(parts.layout),
        "the list of parameter groups": describe_groups(model, optimizer),
    }
    first = FirstStates(optimizer, choice.make, keeps_average=config.ema_decay is not None)
    if _is_in_seats(parallel, atomic):
        check_types(optimizer, choice.make, next(model.parameters()).device)
        if config.ema_decay is not None:
            slots = [replace(one, moments=(*one.moments, AVERAGE)) for one in slots]
        make = _by_seat(made, parallel, first, slots, least_bytes, gathers)
    else:
        make = _whole(made, OptimizerMemory(optimizer, names_of(model)), first, parallel.cell, least_bytes)
    at_first = Table(
        parts,
        cell=parallel.cell,
        shares_weights=parallel.shards == "parameters",
        deals_lanes=parallel.shards in ("gradients", "parameters"),
        copies=parallel.copies if parallel.shards != "none" else EVERYWHERE,
    )
    shards = StateShards(cut=cut, at_first=at_first, hold=make)
    state = AppliedState(*made, config, shards, parts.layout, outline)
    if config.ema_decay is not None:
        keep_average(optimizer, config.ema_decay, lambda: state.num_updates)
    return state


def optimizer_of(
    model: nn.Module,
    config: OptimizerConfig,
    total_steps: int,
    groups: Sequence[ParameterGroup],
    choice: OptimizerChoice,
) -> tuple[Optimizer, LambdaLR]:
    """Return the optimizer of all parameters that are trained, and its schedule."""
    built = build_groups(model, groups, config, choice.settings_of(model))
    try:
        optimizer = choice.make(built)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # e.g. it takes only matrices
        raise ConfigError(f"optimizer.name: '{config.name}' refuses the model's parameters: {error}") from error
    scheduler = LambdaLR(optimizer, lambda step: rate_factor(step, config, total_steps))
    optimizer._opt_called = True  # type: ignore[attr-defined]  # a skipped first update is no mistake; torch would warn
    return optimizer, scheduler


def _check_scales(model: nn.Module) -> None:
    """Refuse trained weights in float16: torch's scaler raises an error for their gradients, in the first step."""
    for name, one in model.named_parameters():
        if one.requires_grad and one.dtype == torch.float16:
            raise ConfigError(
                f"precision: fp16 scales the gradients of float32 weights, and '{name}' is float16: leave out half() "
                "in the task's build_model, since autocast computes in float16 anyway, or set precision to fp32"
            )


def _parts_of(
    made: Made, cut: CutModel, parallel: ParallelConfig, atomic: Collection[int], optimizer_name: str
) -> Parts:
    """Return the model's parts; refuse to cut a parameter that the optimizer updates as a whole (group in `atomic`)."""
    model, optimizer, *_ = made
    units = unit_names(model) if _is_in_seats(parallel, atomic) else []
    layout = layout_of(model, optimizer, cut.plan.dims, lambda name: unit_of(name, units), atomic=atomic)
    for tensor in layout.tensors:
        name = tensor.names[0]
        if tensor.is_atomic and name in cut.cuts and cut.cuts[name].is_in_parts:
            what = f"optimizer.name: {optimizer_name}, which updates '{name}' as a whole"
            raise refused("optimizers that need whole parameters", what)
    places = range(0, parallel.cell.size, parallel.cell.context)
    starts = {name: [one.run(place)[0] for place in places] for name, one in cut.cuts.items()}
    return Parts(layout, columns_of(model, optimizer, cut, parallel, units, atomic), starts, cut.outline.keys())


def columns_of(
    model: nn.Module,
    optimizer: Optimizer,
    cut: CutModel,
    parallel: ParallelConfig,
    units: list[str],
    atomic: Collection[int] = (),
) -> list[Column]:
    """Return the column (shard group) of each model part; the model is whole, or on the meta device.

    Tensors are exchanged per unit and per chunk of a stage, because each chunk's gradients are summed separately.
    Experts that are spread over ranks are summed over a different group.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    spread = cut.spread_weights() if cut.experts else set()

    def unit_at(place: int) -> Callable[[str], str]:
        chunks = cut.by_chunk(place) if cut.plan.num_chunks > 1 else []
        ids = {id(one): f"{number} " for number, chunk in enumerate(chunks) for one in chunk}
        experts = dict.fromkeys(spread, " experts")
        keys = {name: id(one) for name, one in parameters.items()}
        return lambda name: f"{ids.get(keys[name], '')}{unit_of(name, units)}{experts.get(keys[name], '')}"

    def part_at(place: int) -> Callable[[str, Laid], Laid]:
        return lambda name, whole: cut.cuts[name].part(place) if name in cut.cuts else whole

    places = range(0, parallel.cell.size, parallel.cell.context)
    layouts = [layout_of(model, optimizer, cut.plan.dims, unit_at(place), part_at(place), atomic) for place in places]
    return [column_of(one) if _is_in_seats(parallel, atomic) else Column(one) for one in layouts]


def _is_in_seats(parallel: ParallelConfig, atomic: Collection[int]) -> bool:
    """Return True if ranks hold what their seats give them, be it all of their parts.

    They then have no optimizer state of other stages' parameters, which have no elements and cannot be updated if the
    optimizer needs whole parameters: their groups are in `atomic`.
    """
    return parallel.has_shares or bool(atomic)


def _by_seat(
    made: Made,
    parallel: ParallelConfig,
    first: FirstStates,
    slots: Sequence[Slots],
    least_bytes: float | None,
    gathers: torch.dtype | None,
) -> Callable[[Table], Share]:
    """Return a function that makes a column's sharded state; the optimizer still has all of the model's parameters.

    Sharding removes parameters from the groups, so they are put back before each call: a rank may change its column.
    """
    model, optimizer, *_ = made
    kind = BY_SEAT.get(parallel.shards, Zero1Share)
    if kind is Zero3Share:
        _check_state_is_whole(model)
    offload = None
    if parallel.has_offload:
        offload = Offload(host_memory_of(next(model.parameters()).device), parallel.offload == "all")
    parameters = [list(group["params"]) for group in optimizer.param_groups]

    def make(table: Table) -> Share:
        for group, own in zip(optimizer.param_groups, parameters, strict=True):
            group["params"] = list(own)
        return kind(*made, table, first, slots, least_bytes, parallel.wire, offload, gathers)

    return make


def _whole(
    made: Made, memory: OptimizerMemory, first: FirstStates, cell: Cell, least_bytes: float | None
) -> Callable[[Table], Share]:
    """Return a function that makes unsharded state for a column's part; the optimizer has no state for it yet."""
    _, optimizer, *_ = made
    has_state = bool(optimizer.state)

    def make(table: Table) -> Share:
        if cell.holds_parts:  # drop the state of the whole model, or of another part
            optimizer.state.clear()
            for number, group in enumerate(optimizer.param_groups if has_state else ()):
                optimizer.state.update({one: dict(first.of(number, one)[0]) for one in group["params"]})
            first.forget()
        return Share(*made, table, memory, first, least_bytes)

    return make


def _check_state_is_whole(model: nn.Module) -> None:
    """Refuse trained weights outside `state_dict`: commits lack them, and lost ranks may hold their only shards."""
    saved, named = set(model.state_dict()), model.named_parameters(remove_duplicate=False)
    others = [name for name, one in named if one.requires_grad and name not in saved]
    if others:
        what = f"{counted(len(others), 'trained weight')} that state_dict leaves out, such as '{others[0]}'"
        raise refused("weights outside `state_dict`", what)


def keep_average(optimizer: Optimizer, decay: float, num_updates: Callable[[], int]) -> None:
    """Update the exponential moving average of every parameter after each of the optimizer's steps.

    It is one more moment, debiased as Adam's are (Kingma & Ba, 2015, section 3): after step t the weights of step i
    count for decay^(t - i), and the initial weights not at all. The update is elementwise, whatever the cut.

    `num_updates` returns the number of updates before the current one; skipped steps do not count, or the initial
    weights would enter the average. A parameter without an average, e.g. of a new shard, starts from its weights before
    the step.
    """
    begun: dict[Tensor, Tensor] = {}

    def begin(one: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Set the weights aside: torch's optimizers initialize a parameter's state only if it is empty."""
        begun.update((each, each.detach().clone()) for each in _trained(one) if AVERAGE not in one.state.get(each, {}))

    def update(one: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        for parameter, weights in begun.items():
            one.state[parameter][AVERAGE] = weights
        begun.clear()
        _update(one, (1.0 - decay) / (1.0 - decay ** (num_updates() + 1)))

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(update)


def _trained(optimizer: Optimizer) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]


@torch.no_grad()
def _update(optimizer: Optimizer, share: float) -> None:
    """Move every average towards the weights by the fraction `share`."""
    if trained := _trained(optimizer):
        torch._foreach_lerp_([optimizer.state[one][AVERAGE] for one in trained], trained, share)
