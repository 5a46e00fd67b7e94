"""Read a configuration's real model for a plan, built and run on fake tensors, which have shapes but no memory.

A model whose passes depend on values (`.item()`) is run once on real tensors if it is small enough.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.optim import Optimizer

from elastic_train.config.monitoring import TrackingConfig
from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.config.schema import Config
from elastic_train.core.order import Cursor
from elastic_train.errors import ConfigError
from elastic_train.job.build import optimizer_of
from elastic_train.job.model_layout import layout_of, make_gradients_dense
from elastic_train.job.optimizers.choice import choose
from elastic_train.job.plan import Plan, check_placements, make_plan
from elastic_train.job.sharded.elementwise import atomic_groups
from elastic_train.job.units.blocks import recompute_blocks, unit_names, unit_of
from elastic_train.job.units.float8 import scale_linear_layers
from elastic_train.parallel.devices.switches import begin_training
from elastic_train.planning.arithmetic.layouts import Batch, Layout
from elastic_train.planning.arithmetic.model import MOST_LANES, ModelFacts, Sizes, Unit
from elastic_train.planning.tracing import REST, Trace, UnitTrace
from elastic_train.system.wording import first_line, size
from elastic_train.tasks.task import Grouping, Task

MOST_REAL_BYTES = 2e9
_TRIED = 256


@dataclass(frozen=True, slots=True)
class Read:
    """A model and the way its configuration trains it."""

    facts: ModelFacts
    layout: Layout
    batch: Batch
    num_steps: int
    plan: Plan
    refused: Sequence[str] = ()
    """Reasons why the trainer refuses this task with the configured degrees; the plan can still be computed."""


def read_config(config: Config) -> Read:
    """Read a configuration's model, data and layout; raises ConfigError or DataError as training would."""
    parallel = config.parallel
    # This machine's hardware and packages are not checked: the plan may be for another machine.
    here = {
        "precision": "bf16" if config.precision == "fp8" else config.precision,
        "device": "auto",
        "compile": False,
        "parallel": ParallelConfig(shards=parallel.shards, recompute=parallel.recompute, transport=parallel.transport),
        "tracking": TrackingConfig(),
    }
    plan = make_plan(config.model_copy(update=here))
    plan = replace(plan, config=plan.config.model_copy(update={"precision": config.precision}))
    batches = _first_batches(plan)
    facts = read_model(plan, [tensors for tensors, _ in batches])
    facts = replace(facts, samples=statistics.fmean(num_samples for _, num_samples in batches))
    layout = Layout(
        shards=parallel.shards,
        copies=parallel.copies if parallel.shards != "none" else 1,
        recompute=parallel.recompute,
        offload=parallel.offload,
        tensor=parallel.tensor,
        sequence=parallel.sequence,
        pipeline=parallel.pipeline,
        expert=parallel.expert,
        context=parallel.context,
        interleave=parallel.virtual_stages,
        schedule="gpipe" if parallel.schedule == "gpipe" else "1f1b",
        bucket_mb=parallel.bucket_mb,
        wire=parallel.wire,
    )
    refused = _refused(plan.task, config)
    return Read(facts, layout, Batch(plan.num_lanes, plan.micro_batch), plan.total_steps, plan, refused)


def _refused(task: Task, config: Config) -> Sequence[str]:
    try:
        check_placements(task, config)
    except ConfigError as error:
        return error.problems
    return ()


def read_model(plan: Plan, batches: Sequence[dict[str, Tensor]]) -> ModelFacts:
    """Trace the largest of several micro-batches and scale the work to their mean size."""
    largest = max(batches, key=_numel)
    try:
        facts = _traced(plan, largest, FakeTensorMode(allow_non_fake_inputs=True))
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - what a model's own code raises on fakes is of any kind
        facts = _traced_for_real(plan, largest, error)
    mean = sum(_numel(batch) for batch in batches) / len(batches) / _numel(largest)
    return facts if mean == 1 else _scaled(facts, mean)


def _first_batches(plan: Plan) -> list[tuple[dict[str, Tensor], int]]:
    """Return micro-batches of the first step, each with its number of samples: few rows do not fill them."""
    lanes = range(min(plan.num_lanes, MOST_LANES))
    steps = plan.feed.training(plan.order, lanes, Cursor(), num_steps=1)
    found = [(batch.tensors, len(batch.ids)) for step in steps for batch in step if batch.tensors]
    if not found:
        raise ConfigError(f"data.train: {plan.manifest.url}: the first step has no samples to plan with")
    return found


def _numel(batch: dict[str, Tensor]) -> int:
    return max(1, sum(one.numel() for one in batch.values()))


def _traced_for_real(plan: Plan, batch: dict[str, Tensor], why: Exception) -> ModelFacts:
    name = plan.config.task.path
    try:
        model = plan.task.build_model()
    except (RuntimeError, ValueError, TypeError, MemoryError) as error:
        raise ConfigError(f"task.path: the model of '{name}' cannot be built: {first_line(error)}") from error
    if (num_bytes := sum(one.nbytes for one in model.parameters())) > MOST_REAL_BYTES:
        raise ConfigError(
            f"task.path: the model of '{name}' ({size(num_bytes)}) cannot be planned: its passes depend on values, so "
            f"they cannot be followed without computing them ({first_line(why)})"
        ) from why
    del model
    return _traced(plan, batch, None)


def _traced(plan: Plan, batch: dict[str, Tensor], fakes: FakeTensorMode | None) -> ModelFacts:
    with fakes or contextlib.nullcontext(), torch.random.fork_rng(devices=[]):
        model = plan.task.build_model()
        make_gradients_dense(model)
        begin_training(model)
        if plan.config.precision == "fp8":
            scale_linear_layers(model)
        optimizer = _optimizer_of(plan, model)  # freezes what the task wants frozen
        given = {name: fakes.from_tensor(one) if fakes else one for name, one in batch.items()}
        known = [*model.parameters(), *model.buffers(), *given.values()]
        names = unit_names(model)
        recompute = plan.config.parallel.recompute
        recompute_blocks(model, "selective" if recompute == "selective" else "none")
        trace = Trace(model, names, known)
        with trace.watching():
            with _autocast(plan):
                total = plan.task.loss(model, given).total
            trace.end_forward()
            torch.autograd.backward(total)
        del total
        return _facts(plan, model, optimizer, trace, given)


def _optimizer_of(plan: Plan, model: nn.Module) -> Optimizer:
    config = plan.config.optimizer
    groups = plan.task.parameter_groups(model) if isinstance(plan.task, Grouping) else ()
    return optimizer_of(model, config, plan.total_steps, groups, choose(config, "cpu"))[0]


def _autocast(plan: Plan) -> contextlib.AbstractContextManager[object]:
    """Return the autocast context of a lane's loss, for fake CPU tensors."""
    return contextlib.nullcontext() if plan.compute_type is None else torch.autocast("cpu", plan.compute_type)


def _facts(plan: Plan, model: nn.Module, optimizer: Optimizer, trace: Trace, batch: dict[str, Tensor]) -> ModelFacts:
    config, names = plan.config, list(trace.units)[:-1]
    with unset_fake_temporarily():
        atomic = atomic_groups(optimizer, choose(config.optimizer, "cpu").make)
    cut = layout_of(model, optimizer, {}, lambda name: unit_of(name, names), atomic=atomic)
    elements, trained, experts, trained_experts = (Counter[str]() for _ in range(4))
    for flat in cut.flats:
        elements[flat.unit] += flat.numel
        trained[flat.unit] += flat.numel if flat.group is not None else 0
    for name, parameter in model.named_parameters():
        if ".experts." in f".{name}":
            experts[unit_of(name, names)] += parameter.numel()
            trained_experts[unit_of(name, names)] += parameter.numel() * parameter.requires_grad
    parameters = list(model.parameters())
    of_trained = [one for one in parameters if one.requires_grad]

    def unit(name: str, traced: UnitTrace) -> Unit:
        return Unit(
            name, elements[name], trained[name], traced.forward, traced.backward, traced.saved_bytes,
            traced.output_bytes, experts[name], trained_experts[name],
        )  # fmt: skip

    units = {name: unit(name, traced) for name, traced in trace.units.items()}
    saved = sum(one.saved_bytes for one in units.values())
    return ModelFacts(
        name=type(model).__name__,
        blocks=tuple(units[name] for name in names),
        rest=units[REST],
        samples=plan.micro_batch,
        tokens=int(batch["tokens"].numel()) if "tokens" in batch else 0,
        sizes=Sizes(_bytes_each(parameters), _bytes_each(of_trained), _state_bytes(config.optimizer, of_trained)),
        transient_bytes=max(0.0, trace.peak_bytes - saved),
        buffer_bytes=float(sum(one.nbytes for one in model.buffers())),
        input_bytes=float(sum(one.nbytes for one in batch.values())),
        largest_tensor=max(one.numel() for one in of_trained),
        num_tensors=len(of_trained),
        tied=_tied(model, names),
        precision=config.precision,
        cut=cut,
    )


def _tied(model: nn.Module, units: list[str]) -> int:
    """Return the number of elements outside the blocks that have several names."""
    listed = list(model.named_parameters(remove_duplicate=False))
    uses = Counter(id(one) for name, one in listed if not unit_of(name, units))
    return sum(one.numel() for one in model.parameters() if uses[id(one)] > 1)


def _bytes_each(parameters: Sequence[Tensor]) -> float:
    """Return the mean bytes per element."""
    return sum(one.nbytes for one in parameters) / max(1, sum(one.numel() for one in parameters))


def _state_bytes(config: OptimizerConfig, trained: Sequence[Tensor]) -> float:
    """Return the optimizer's bytes per matrix element, found by updating a small matrix of the usual dtype."""
    choice, numbers = choose(config, "cpu"), Counter[torch.dtype]()
    for one in trained:
        numbers[one.dtype] += one.numel()
    [(usual, _)] = numbers.most_common(1)
    matrix = nn.Parameter(torch.zeros(_TRIED, _TRIED, dtype=usual))
    optimizer = choice.make([{"params": [matrix], **({"use_muon": True} if config.name == "muon" else {})}])
    matrix.grad = torch.zeros_like(matrix)
    optimizer.step()
    kept = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]
    num_bytes = sum(one.nbytes for one in kept if one.numel() > 1)
    return num_bytes / matrix.numel() + (matrix.element_size() if config.ema_decay is not None else 0)


def _scaled(facts: ModelFacts, mean: float) -> ModelFacts:
    """Return the facts with the work scaled to a micro-batch of size `mean`."""

    def unit(one: Unit) -> Unit:
        forward, backward = one.forward.times(mean), one.backward.times(mean)
        return replace(one, forward=forward, backward=backward, output_bytes=one.output_bytes * mean)

    return ModelFacts(
        **{
            **{name: getattr(facts, name) for name in facts.__dataclass_fields__},
            "blocks": tuple(unit(one) for one in facts.blocks),
            "rest": unit(facts.rest),
            "tokens": round(facts.tokens * mean),
        }
    )
