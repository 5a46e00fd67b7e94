"""Plan how the ranks of a cell split a task's model: tensor cuts, pipeline stages and spread experts.

The task's placements are checked completely before anything is built; an error names the module and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from torch import Tensor, nn

from elastic_train.config.combinations import Feature, Found, check, refused
from elastic_train.config.parallel import ParallelConfig
from elastic_train.errors import ConfigError
from elastic_train.job.units.blocks import unit_names, unit_of
from elastic_train.parallel.linear_products import ScaledLinear, fits
from elastic_train.placement.grains import MOST_DEGREE, CutDims
from elastic_train.tasks.decoder.experts import Experts, MixtureOfExperts
from elastic_train.tasks.placements import CUTS, TOKEN_USES, Degrees, Placements, Placing, Running, Stream, Use
from elastic_train.tasks.task import Task, replaces

T = TypeVar("T")
DIMENSIONS: Mapping[str, int] = {"column": 0, "row": 1}
"""Dimension along which a linear layer's weight (outputs, inputs) is cut; columns and rows of its transpose."""


@dataclass(frozen=True, slots=True)
class CellPlan:
    """The split of a model over a cell: tensor cuts by module name, modules of each pipeline piece, and spread experts.

    Names are full names. Each field is empty if unused. `dims` gives the dimension along which any degree cuts a
    parameter. Pieces are in execution order; each of N stages has `num_chunks` of them, every N-th.
    """

    tensor: Mapping[str, Use] = field(default_factory=dict)
    pieces: Sequence[Sequence[str]] = ()
    num_chunks: int = 1
    experts: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    """Modules with experts that lie in recomputed (checkpointed) blocks."""
    dims: CutDims = field(default_factory=dict)
    shares_tokens: bool = False
    """True if tensor ranks split the tokens of each row between cut modules (sequence parallelism)."""
    draws: Mapping[str, tuple[Stream, Stream]] = field(default_factory=dict)
    """Random numbers of tensor ranks during and after a module, by its name."""

    @property
    def num_stages(self) -> int:
        return len(self.pieces) // self.num_chunks


class _Demand(NamedTuple):
    """A feature and what it needs from a task: its methods, and a field of the result of `placements`."""

    feature: Feature
    methods: type
    field: str
    uses: Sequence[str] = ()

    def is_met(self, placed: Placements) -> bool:
        value = getattr(placed, self.field)
        return not set(self.uses).isdisjoint(value.values()) if self.uses else bool(value)


_DEMANDS = (
    _Demand("tensor", Placing, "tensor", CUTS),
    _Demand("sequence", Placing, "tensor", TOKEN_USES),
    _Demand("pipeline", Running, "stages"),
    _Demand("context", Running, "context"),
)


def traits_of(task: Task, parallel: ParallelConfig, placed: Placements | None = None) -> Iterator[Found]:
    """Yield the reasons why features do not work with a task: missing methods, or fields missing from `placed`."""
    if (parts := parallel.tensor * parallel.expert) > MOST_DEGREE:
        yield Found("more parts than a dimension has", f"{parts} parts, of which a dimension has {MOST_DEGREE}")
    kind = type(task).__name__
    for one in _DEMANDS:
        if not isinstance(task, one.methods) or not (placed is None or one.is_met(placed)):
            also = " and `run`" if one.methods is Running else ""
            lacks = f"{kind}, which does not say how (`{one.field}` of `placements`{also})"
            yield Found("a task that does not place its modules so", lacks, one.feature)
    if isinstance(task, Running) and replaces(type(task), "loss", but_not="run"):
        yield Found("a task that replaces `loss` and not `run`", f"{kind}, which replaces `loss` and not `run`")


def check_fits_cells(task: Task, parallel: ParallelConfig) -> None:
    """Raise ConfigError if the model is to be split and its task does not say how."""
    check(parallel.features, traits_of(task, parallel))


def cell_plan_of(task: Task, model: nn.Module, parallel: ParallelConfig) -> CellPlan | None:
    """Return how cells of these degrees split a task's model; None if every rank holds all of it.

    Raises ConfigError, with every reason, if the task does not say how, or the model cannot be split that way.
    """
    if parallel.cell.size == 1:
        return None
    check_fits_cells(task, parallel)
    stages = parallel.num_pieces if parallel.pipeline > 1 else 1
    degrees = Degrees(parallel.tensor, parallel.sequence, stages, parallel.context)
    placed = Placements() if degrees == Degrees() else _placements_of(task, model, degrees)
    experts = _experts_of(model, parallel)
    check(parallel.features, [*placed.found, *_traits_of_experts(experts, model, parallel)])
    check(parallel.features, traits_of(task, parallel, placed))  # last, as the model's own traits explain more
    if not parallel.cell.holds_parts and not parallel.has_shares:
        return None
    tensor = placed.tensor if parallel.tensor > 1 else {}
    tensor = {name: use for name, use in tensor.items() if parallel.sequence or use in CUTS}
    pieces = placed.stages if parallel.pipeline > 1 else ()
    check(parallel.features, _uneven(tensor, model, parallel.tensor))
    if pieces and (wrong := list(_mistakes(pieces, model, parallel.num_pieces))):
        raise ConfigError(*wrong)
    units = unit_names(model) if parallel.recompute != "none" else []
    again = tuple(name for name in experts if name in units or unit_of(name, units))
    dims = cut_dims_of(task, model)
    draws = placed.draws if parallel.tensor > 1 else {}
    return CellPlan(tensor, pieces, parallel.num_chunks, tuple(experts), again, dims, parallel.sequence, draws)


def check_fits_float8(plan: CellPlan, model: nn.Module, degree: int) -> None:
    """Raise ConfigError if a tensor rank's part of a layer in float8 is too narrow, and would be computed otherwise."""
    for name, use in plan.tensor.items():
        layer = model.get_submodule(name)
        if use in DIMENSIONS and isinstance(layer, ScaledLinear):
            sizes, dim = list(layer.weight.shape), DIMENSIONS[use]
            sizes[dim] //= degree
            if not fits(sizes):
                what = f"the {layer.weight.shape[dim]} {use}s of '{name}' on {degree} tensor ranks"
                raise refused("unfit linear layers", what)


def cut_dims_of(task: Task, model: nn.Module) -> CutDims:
    """Return the dimension along which any degree cuts each parameter, by each of its names; others stay whole.

    It depends on the model alone, so that measurements per grain are the same at every degree.
    """
    placed = _placements_of(task, model, Degrees(), may_refuse=True) if isinstance(task, Placing) else Placements()
    return dims_of(placed.tensor, model)


def _placements_of(task: Task, model: nn.Module, degrees: Degrees, *, may_refuse: bool = False) -> Placements:
    """Return a task's placements with full names.

    Raises ConfigError if the task's code fails, or if it refuses and `may_refuse` is False. A task that refuses degrees
    of 1 has a model that cannot be cut.
    """
    assert isinstance(task, Placing), "it was checked"
    call = f"placements(model, {degrees}) of {type(task).__name__}"
    must = "it has to cut the same modules for any degree of tensor, also for 1, or raise ConfigError"
    try:
        placed = task.placements(model, degrees)
    except ConfigError:
        if may_refuse:
            return Placements()
        raise
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(f"{call} raises {type(error).__name__}: {error}; {must}") from error
    if not isinstance(placed, Placements):
        raise ConfigError(f"{call} returns {placed!r}, which is no Placements; {must}")
    tensor = _named(placed.tensor, model)
    if degrees.tensor > 1 and placed.tensor and not tensor:
        raise ConfigError(f"{call} names '{next(iter(placed.tensor))}', and the model has no such module")
    stages = tuple(tuple(one) for one in placed.stages)
    return replace(placed, tensor=tensor, stages=stages, draws=_named(placed.draws, model))


def dims_of(uses: Mapping[str, Use], model: nn.Module) -> CutDims:
    """Return the cut dimensions that uses (by full name) imply; experts are always cut along dimension 0."""
    dims = {id(one): 0 for experts in model.modules() if isinstance(experts, Experts) for one in experts.parameters()}
    for name, use in uses.items():
        dims |= {id(one): dim for one, dim in cut_parameters(model.get_submodule(name), use)}
    named = model.named_parameters(remove_duplicate=False)
    return {name: dims[id(one)] for name, one in named if id(one) in dims}


def cut_parameters(layer: nn.Module, use: Use) -> Iterator[tuple[Tensor, int]]:
    """Yield the parameters of a layer that tensor ranks cut, each with the dimension of the cut."""
    if use in DIMENSIONS and isinstance(layer, nn.Linear):
        yield layer.weight, DIMENSIONS[use]
        if layer.bias is not None and use == "column":  # a row layer's bias is added once, to the sum
            yield layer.bias, 0


def _experts_of(model: nn.Module, parallel: ParallelConfig) -> dict[str, Experts]:
    """Return the modules whose experts are spread over ranks, by name, in execution order.

    Tensor parallelism spreads only those in mixtures, which sum the experts' outputs.
    """
    if parallel.expert == parallel.tensor == 1:
        return {}
    dealt = {name: one for name, one in model.named_modules() if isinstance(one, Experts)}
    mixed = [one.experts for one in model.modules() if isinstance(one, MixtureOfExperts)]
    return {name: one for name, one in dealt.items() if one in mixed} if parallel.tensor > 1 else dealt


def _traits_of_experts(dealt: Mapping[str, Experts], model: nn.Module, parallel: ParallelConfig) -> Iterator[Found]:
    degree = parallel.expert * parallel.tensor
    every = [name for name, one in model.named_modules() if isinstance(one, Experts)]
    if not every:
        yield Found("a model without experts", f"{type(model).__name__}, which has no experts")
    if parallel.tensor > 1 and parallel.expert > 1 and (alone := [name for name in every if name not in dealt]):
        yield Found("experts outside `MixtureOfExperts`", f"the experts '{alone[0]}', which are in no MixtureOfExperts")
    for name, one in dealt.items():
        if one.num_experts % degree:
            what = f"the {one.num_experts} experts of '{name}' (task.params.model.experts)"
            yield Found("a size that it does not divide", what)


def _named(patterns: Mapping[str, T], model: nn.Module) -> Mapping[str, T]:
    """Return values with full module names; `*` stands for one part of a name."""
    modules, named = dict(model.named_modules()), dict[str, T]()
    for pattern, use in patterns.items():
        if "*" in pattern:
            fits = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")).fullmatch
            named |= {name: use for name in modules if fits(name)}
        elif pattern in modules:
            named[pattern] = use
    return named


def _uneven(uses: Mapping[str, Use], model: nn.Module, degree: int) -> Iterator[Found]:
    """Yield sizes that the degree does not divide; raise ConfigError for uses that do not fit the module's class."""
    for name, use in uses.items():
        module = model.get_submodule(name)
        if use == "dropout" and not isinstance(module, nn.Dropout):
            raise ConfigError(f"the task's placements have '{name}' as a dropout, which it is not")
        if use not in DIMENSIONS:
            continue
        if not isinstance(module, nn.Linear):
            kind = type(module).__name__
            raise ConfigError(f"the task's placements cut '{name}' by {use}s, which a {kind} cannot be")
        if (size := module.weight.shape[DIMENSIONS[use]]) % degree:
            yield Found("a size that it does not divide", f"the {size} {use}s of '{name}'", "tensor")


def _mistakes(stages: Sequence[Sequence[str]], model: nn.Module, num_stages: int) -> Iterator[str]:
    """Yield the mistakes in a task's stages."""
    where, modules = "the task's `Placements.stages`", dict(model.named_modules())
    if len(stages) != num_stages:
        yield f"{where} has {len(stages)} stages, not {num_stages}"
        return
    if empty := [number for number, stage in enumerate(stages) if not stage]:
        yield f"{where} has no modules in stage {empty[0]}"
        return
    if unknown := [name for stage in stages for name in stage if name not in modules]:
        yield f"{where} names '{unknown[0]}', which the model does not have"
        return
    owners = _owners(stages, modules)
    for name, one in model.named_parameters():
        found = sorted(owners.get(id(one), ()))
        if not found:
            yield f"{where} has '{name}' in no stage"
        elif len(found) > 1 and found != [0, num_stages - 1]:
            yield (
                f"{where} has '{name}' in the stages {', '.join(map(str, found))}: only the first and the last "
                "can share one; give each stage a parameter of its own"
            )
        elif not one.ndim:
            yield f"{where}: '{name}' is a number, which cannot be left out of a stage: give it the shape (1,)"


def _owners(stages: Sequence[Sequence[str]], modules: Mapping[str, nn.Module]) -> dict[int, set[int]]:
    """Return the stages that use each parameter, by the parameter's id."""
    owners: dict[int, set[int]] = {}
    for number, stage in enumerate(stages):
        for name in stage:
            for one in modules[name].parameters():
                owners.setdefault(id(one), set()).add(number)
    return owners
