"""How the ranks of a cell hold a task's model: which of its modules are cut, which are in which stage, and which
experts are spread.

What a task says is checked in full before anything is built on it; a mistake names the module, and what to set instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, get_args

from torch import Tensor, nn

from elastic_train.config.parallel import ParallelConfig
from elastic_train.errors import ConfigError
from elastic_train.job.units.blocks import unit_names, unit_of
from elastic_train.shards.grains import MOST_DEGREE, CutDims
from elastic_train.tasks.decoder.experts import Experts, MixtureOfExperts
from elastic_train.tasks.task import (
    SequencePlan,
    SequenceSplitting,
    Sequencing,
    SequencingStages,
    Splitting,
    StagePlan,
    Staging,
    Task,
    TensorPlan,
    TensorUse,
)

Use = TypeVar("Use")
DIMENSIONS: Mapping[str, int] = {"column": 0, "row": 1}
"""Which dimension is cut of a linear layer's weight, (outputs, inputs): its transpose is what has columns and rows."""


@dataclass(frozen=True, slots=True)
class CellPlan:
    """What becomes of modules that are cut, and of those that run on some tokens each, by full names; the modules of
    each piece of a pipeline, and those whose experts are spread over ranks; empty if there are none. `dims` says along
    which dimension cells of any degree cut a parameter.

    Of pieces, in the order in which they run, each stage has `num_chunks`: of N stages every N-th.
    """

    tensor: TensorPlan = field(default_factory=dict)
    sequence: SequencePlan = field(default_factory=dict)
    pieces: StagePlan = ()
    num_chunks: int = 1
    experts: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    """Of the modules with experts those in blocks that a backward pass computes again."""
    dims: CutDims = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        return len(self.pieces) // self.num_chunks


def check_fits_cells(task: Task, parallel: ParallelConfig) -> None:
    """Raise ConfigError if ranks are to hold parts of a model, and its task does not say which."""
    kind, wrong = type(task).__name__, list[str]()
    if (degree := parallel.tensor * parallel.expert) > MOST_DEGREE:
        wrong.append(
            f"parallel.tensor x parallel.expert: {degree} is more than the {MOST_DEGREE} parts that a dimension can be "
            "cut into: set either to less"
        )
    if parallel.tensor > 1 and not isinstance(task, Splitting):
        wrong.append(
            f"parallel.tensor: {parallel.tensor} needs a task that says how its model is cut, and {kind} does "
            "not (`tensor_plan`): set it to 1, or use parallel.shards to hold less on each rank"
        )
    if parallel.sequence and not isinstance(task, SequenceSplitting):
        wrong.append(
            f"parallel.sequence: true needs a task that says which modules run on some tokens each, and {kind} does "
            "not (`sequence_plan`): set it to false"
        )
    if parallel.pipeline > 1 and not isinstance(task, Staging):
        wrong.append(
            f"parallel.pipeline: {parallel.pipeline} needs a task whose model runs in stages, and that of {kind} does "
            "not (`stage_plan`, `run_stage`): set it to 1, or use parallel.shards to hold less on each rank"
        )
    if parallel.context > 1 and not isinstance(task, Sequencing):
        wrong.append(
            f"parallel.context: {parallel.context} needs a task that computes a part of a row's tokens, and {kind} "
            "does not (`loss_of_part`): set it to 1, or use parallel.recompute to keep less of each row"
        )
    elif parallel.context > 1 and parallel.pipeline > 1 and not isinstance(task, SequencingStages):
        wrong.append(
            f"parallel.context: {parallel.context} beside parallel.pipeline: {parallel.pipeline} needs a task that "
            f"computes a part of a row's tokens in stages, and {kind} does not (`run_stage_of_part`): set either to 1"
        )
    if wrong:
        raise ConfigError(*wrong)


def cell_plan_of(task: Task, model: nn.Module, parallel: ParallelConfig) -> CellPlan | None:
    """Return how cells of these degrees hold a task's model; None where every rank holds all of its state.

    Raises ConfigError if the task does not say, or the model cannot be held so.
    """
    if parallel.cell.size == 1:
        return None
    check_fits_cells(task, parallel)
    if parallel.context > 1:
        assert isinstance(task, Sequencing), "it was checked"
        task.check_parts(model, parallel.context)
        if not parallel.cell.holds_parts and not parallel.has_shares:
            return None
    tensor: TensorPlan = {}
    sequence: SequencePlan = {}
    pieces: StagePlan = ()
    if parallel.tensor > 1:
        assert isinstance(task, Splitting), "it was checked"
        tensor = _tensor_plan_of(task, model, parallel.tensor)
        for name, use in tensor.items():
            if use in DIMENSIONS:
                _check_linear(name, model.get_submodule(name), use, parallel.tensor)
    if parallel.sequence:
        assert isinstance(task, SequenceSplitting), "it was checked"
        sequence = _named(task.sequence_plan(model, parallel.tensor), model)
        for name, kind in sequence.items():
            if kind == "dropout" and not isinstance(model.get_submodule(name), nn.Dropout):
                raise ConfigError(f"the task's sequence_plan has '{name}' as a dropout, which it is not")
    if parallel.pipeline > 1:
        assert isinstance(task, Staging), "it was checked"
        pieces = tuple(tuple(piece) for piece in task.stage_plan(model, parallel.num_pieces))
        if wrong := list(_mistakes(pieces, model, parallel.num_pieces)):
            raise ConfigError(*wrong)
    experts = _experts_of(task, model, parallel) if parallel.expert > 1 or parallel.tensor > 1 else ()
    if experts and parallel.sequence:
        raise ConfigError(
            f"parallel.sequence shares out tokens, and tensor ranks have some of the experts of '{experts[0]}' each, "
            "which need all of them: set sequence to false"
        )
    units = unit_names(model) if parallel.recompute != "none" else []
    again = tuple(name for name in experts if name in units or unit_of(name, units))
    return CellPlan(tensor, sequence, pieces, parallel.num_chunks, experts, again, cut_dims_of(task, model))


def cut_dims_of(task: Task, model: nn.Module) -> CutDims:
    """Return along which dimension cells of any degree cut each parameter, by all of its names; others stay whole.

    It follows from the model alone, so what is measured by grains is the same at every degree.
    """
    plan = _tensor_plan_of(task, model, 1, may_refuse=True) if isinstance(task, Splitting) else {}
    return dims_of(plan, model)


def _tensor_plan_of(task: Splitting, model: nn.Module, degree: int, *, may_refuse: bool = False) -> TensorPlan:
    """Return a task's plan with full names; ConfigError if its code fails, or if it refuses and may not.

    A task that refuses a degree of 1 has a model that no degree can cut.
    """
    call = f"tensor_plan(model, {degree}) of {type(task).__name__}"
    must = "it has to name the same modules for any degree, also for 1, or raise ConfigError"
    try:
        plan = task.tensor_plan(model, degree)
    except ConfigError:
        if may_refuse:
            return {}
        raise
    except Exception as error:  # a user's own code may raise anything, and is named with it
        raise ConfigError(f"{call} raises {type(error).__name__}: {error}; {must}") from error
    if not isinstance(plan, Mapping):
        raise ConfigError(f"{call} returns {plan!r}, which is no mapping; {must}")
    if unknown := [f"'{name}': {use!r}" for name, use in plan.items() if use not in get_args(TensorUse)]:
        raise ConfigError(f"{call} has {unknown[0]}; it knows {', '.join(get_args(TensorUse))}")
    return _named(plan, model)


def dims_of(plan: TensorPlan, model: nn.Module) -> CutDims:
    """Return the same by a plan with full names; experts are dealt out whatever it says."""
    dims = {id(one): 0 for experts in model.modules() if isinstance(experts, Experts) for one in experts.parameters()}
    for name, use in plan.items():
        dims |= {id(one): dim for one, dim in cut_parameters(model.get_submodule(name), use)}
    named = model.named_parameters(remove_duplicate=False)
    return {name: dims[id(one)] for name, one in named if id(one) in dims}


def cut_parameters(layer: nn.Module, use: TensorUse) -> Iterator[tuple[Tensor, int]]:
    """Yield the parameters of a layer that tensor ranks have a part of each, and the dimension that is cut."""
    if use in DIMENSIONS and isinstance(layer, nn.Linear):
        yield layer.weight, DIMENSIONS[use]
        if layer.bias is not None and use == "column":  # that of a row is added once, to the sum
            yield layer.bias, 0


def _experts_of(task: Task, model: nn.Module, parallel: ParallelConfig) -> tuple[str, ...]:
    """Return the modules whose experts are dealt to ranks, in the order in which they run.

    To tensor ranks are dealt those of mixtures, which add what each of them has made.
    """
    degree = parallel.expert * parallel.tensor
    found = {name: one for name, one in model.named_modules() if isinstance(one, Experts)}
    mixed = [one.experts for one in model.modules() if isinstance(one, MixtureOfExperts)]
    if parallel.tensor > 1:
        if alone := [name for name, one in found.items() if one not in mixed and parallel.expert > 1]:
            raise ConfigError(
                f"parallel.expert: {parallel.expert} beside parallel.tensor: {parallel.tensor} is for experts of a "
                f"MixtureOfExperts, and '{alone[0]}' is in none: set either to 1"
            )
        found = {name: one for name, one in found.items() if one in mixed}
    if not found and parallel.expert > 1:
        raise ConfigError(
            f"parallel.expert: {parallel.expert} spreads experts over ranks, and the model of {type(task).__name__} "
            "has none: set it to 1, or give the package's own decoder some (task.params.model.experts)"
        )
    what = "parallel.expert" if parallel.tensor == 1 else "parallel.tensor x parallel.expert"
    for name, one in found.items():
        if one.num_experts % degree:
            raise ConfigError(
                f"{what}: {degree} does not divide the {one.num_experts} experts of '{name}' "
                "(task.params.model.experts): change either"
            )
    return tuple(found)


def _named(patterns: Mapping[str, Use], model: nn.Module) -> Mapping[str, Use]:
    """Return a task's plan with full names."""
    modules = dict(model.named_modules())
    return {name: use for pattern, use in patterns.items() for name in modules if _is_like(name, pattern)}


def _is_like(name: str, pattern: str) -> bool:
    """Say whether a module's name fits a pattern, in which * stands for one part of a name."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def _check_linear(name: str, module: nn.Module, use: str, degree: int) -> None:
    if not isinstance(module, nn.Linear):
        kind = type(module).__name__
        raise ConfigError(f"the task's tensor_plan cuts '{name}' by {use}s, which a {kind} cannot be")
    if module.weight.shape[DIMENSIONS[use]] % degree:
        raise ConfigError(
            f"parallel.tensor: {degree} does not divide the {module.weight.shape[DIMENSIONS[use]]} {use}s of '{name}'"
        )


def _mistakes(stages: StagePlan, model: nn.Module, num_stages: int) -> Iterator[str]:
    """Yield what is wrong with a task's stages."""
    where, modules = "the task's stage_plan", dict(model.named_modules())
    if len(stages) != num_stages:
        yield f"{where} has {len(stages)} stages, not {num_stages}"
        return
    if unknown := [name for stage in stages for name in stage if name not in modules]:
        yield f"{where} names '{unknown[0]}', which the model does not have"
        return
    owners = _owners(stages, modules)
    for name, one in model.named_parameters():
        found = sorted(owners.get(id(one), ()))
        if not found:
            yield f"{where} has '{name}' in no stage"
        elif len(found) > 1:
            yield (
                f"{where} has '{name}' in the stages {', '.join(map(str, found))}: its gradient would be added in "
                "another order than by one rank; give each stage a parameter of its own"
            )
        elif not one.ndim:
            yield f"{where}: '{name}' is a number, which cannot be left out of a stage: give it the shape (1,)"
    inside = tuple(f"{name}." for stage in stages for name in stage)
    saved = [name for name in dict(model.named_buffers()) if name in model.state_dict()]
    if buffers := [name for name in saved if name.startswith(inside)]:
        yield (
            f"parallel.pipeline: {num_stages} is for models without persistent buffers, and this one has "
            f"'{buffers[0]}': register what is a cache with persistent=False, or set it to 1"
        )


def _owners(stages: StagePlan, modules: Mapping[str, nn.Module]) -> dict[int, set[int]]:
    """Return which stages have which parameter, by its id."""
    owners: dict[int, set[int]] = {}
    for number, stage in enumerate(stages):
        for name in stage:
            for one in modules[name].parameters():
                owners.setdefault(id(one), set()).add(number)
    return owners
