"""A model of which each place of a cell keeps a part: rows or columns of its matrices, or a stage's modules.

A task's placements say how each module is shared (`cell_plan`). The parameters stay the same objects, with less in
them, or nothing, so optimizer and hooks need not know; what the places of a tensor cut exchange (Shoeybi et al. 2019)
is in hooks around the modules. Parameters that are not cut are whole on every place, and get the same gradient there,
to the last bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from elastic_train.core.mesh import Axis, Cell, Mesh
from elastic_train.errors import ConfigError
from elastic_train.job.cells.cell_plan import CellPlan, cut_parameters
from elastic_train.job.cells.layer_hooks import Hook, hooks_of
from elastic_train.job.model_layout import Laid
from elastic_train.parallel.cells.expert_links import ExpertLinks
from elastic_train.parallel.cells.graph_edges import LoneGroup
from elastic_train.parallel.cells.links import CellLinks
from elastic_train.parallel.group import Group
from elastic_train.placement import grains as shards
from elastic_train.placement.norm import in_memory_order
from elastic_train.tasks.decoder.experts import Experts, MixtureOfExperts

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is cut: along `dim`, of a tensor of `shape`; each place has a span [lo, hi), or none of it.

    `whole` says where grains of the whole tensor may not cross; None for one that stays whole wherever it is held. A
    place stores its part with `dim` first, so it is a run of the tensor's elements in memory order.
    """

    dim: int
    shape: torch.Size
    spans: tuple[Span, ...]
    whole: shards.Cut | None = None

    def part_shape(self, place: int) -> torch.Size:
        """The shape of the part of a place."""
        lo, hi = self.spans[place]
        return torch.Size(hi - lo if dim == self.dim else size for dim, size in enumerate(self.shape))

    def part(self, place: int) -> Laid:
        """Return the shape of a place's part, and where its grains may not cross."""
        lo, hi = self.spans[place]
        return Laid(self.part_shape(place), None if self.whole is None or lo == hi else self.whole.part(lo, hi))

    def run(self, place: int) -> Span:
        """Return which elements of the whole tensor a place has, in memory order."""
        row = self.shape.numel() // max(1, self.shape[self.dim])
        lo, hi = self.spans[place]
        return lo * row, hi * row

    def part_of(self, whole: Tensor, place: int) -> Tensor:
        """Return the part of a whole tensor that a place has, in memory of its own."""
        lo, hi = self.spans[place]
        part = whole.movedim(self.dim, 0)[lo:hi].clone(memory_format=torch.contiguous_format)
        return part.movedim(0, self.dim)

    def in_memory(self, part: Tensor) -> Tensor:
        """Return the elements of a place's part in memory order, 1-D: a view if that is how it is stored."""
        return in_memory_order(part.detach(), self.whole)

    def shaped(self, memory: Tensor, place: int) -> Tensor:
        """Return a place's part from its elements in memory order."""
        return self._shaped(memory, self.part_shape(place))

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor from the givers' parts, in memory order."""
        return self._shaped(torch.cat(list(parts)), self.shape)

    def _shaped(self, memory: Tensor, shape: torch.Size) -> Tensor:
        return memory.as_strided(shape, shards.strides_of(shape, self.whole))

    def first_with(self, place: int) -> int | None:
        """Return the first place that holds the same part as one; None if that holds nothing."""
        lo, hi = self.spans[place]
        return self.spans.index((lo, hi)) if lo < hi else None

    @property
    def is_in_parts(self) -> bool:
        """Whether a place has some of it, and not all."""
        return any(0 < hi - lo < self.shape[self.dim] for lo, hi in self.spans)

    @property
    def givers(self) -> list[int]:
        """The places whose parts make up the whole, in the order of their parts: the first of those with equal ones."""
        return [place for place in range(len(self.spans)) if self.first_with(place) == place]


def cuts_of(model: nn.Module, plan: CellPlan, cell: Cell) -> Mapping[str, Cut]:
    """Return how parameters are cut, by each name of every one that is; in a pipeline all are.

    Raises ConfigError if one is cut along another dimension than the plan says of all degrees.
    """
    along: dict[int, tuple[int, Sequence[Axis]]] = {}
    for name in plan.experts:
        along |= {id(one): (0, ("tensor", "expert")) for one in model.get_submodule(name).parameters()}
    for name, use in plan.tensor.items():
        for one, dim in cut_parameters(model.get_submodule(name), use):
            along[id(one)] = dim, ("tensor",)
    stages = {id(one): piece % plan.num_stages for one, piece in pieces_of(model, plan)}
    cuts = dict[str, Cut]()
    for name, one in model.named_parameters(remove_duplicate=False):
        if id(one) in along or id(one) in stages:
            dim, axes = along.get(id(one), (plan.dims.get(name, 0), ()))
            if axes and plan.dims.get(name) != dim:
                raise ConfigError(
                    f"the task's placements cut '{name}' along dimension {dim} for this degree, and do not for a "
                    "degree of 1: name the same modules whatever the degree is"
                )
            whole = shards.cut_along(one.shape, plan.dims.get(name))
            cuts[name] = Cut(dim, one.shape, _spans(one.shape, dim, axes, stages.get(id(one)), cell), whole)
    return cuts


def pieces_of(model: nn.Module, plan: CellPlan) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield the parameters of a pipeline, and the piece that each is in."""
    for piece, modules in enumerate(plan.pieces):
        for name in modules:
            for one in model.get_submodule(name).parameters():
                yield one, piece


def chunks_of(model: nn.Module, plan: CellPlan) -> Mapping[int, int]:
    """Return in which chunk of its stage each parameter is, by its id; nothing without a pipeline."""
    return {id(one): piece // plan.num_stages for one, piece in pieces_of(model, plan)}


def _spans(shape: Sequence[int], dim: int, axes: Sequence[Axis], stage: int | None, cell: Cell) -> tuple[Span, ...]:
    """Return which indices of a dimension each place of a cell has: cut along some axes, or all of one stage's."""
    spans = list[Span]()
    for place in range(cell.size):
        number, degree = 0, 1
        for axis in axes:
            at, count = cell.number_along(place, axis)
            number, degree = number * count + at, degree * count
        length = (shape[dim] if shape else 1) // degree
        is_here = stage in (None, cell.number_along(place, "stage")[0])
        spans.append((number * length, (number + 1) * length) if is_here else (0, 0))
    return tuple(spans)


def all_weights(model: nn.Module) -> Mapping[str, Tensor]:
    """Return all weights and saved buffers, by all of their names; also frozen weights that commits do not hold."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **model.state_dict()}


class CutModel:
    """A model and its cuts; whole, or without memory, until `take_place`."""

    def __init__(self, model: nn.Module, plan: CellPlan, cell: Cell, links: CellLinks) -> None:
        self.model, self.plan, self.links = model, plan, links
        self._degree = cell.tensor
        self.place: int | None = None
        self.cell: Group | None = None
        """All places, by number; `links` are to those that have the other parts of its cut layers."""
        self.has_weights = all(one.untyped_storage().nbytes() or not one.nbytes for one in model.parameters())
        """Whether there were any to begin with."""
        self._hooks = list[Hook]()
        self._parts = dict[str, Tensor]()
        """What a place keeps while the model is whole."""
        self._spread = _experts_at(plan.experts, model)
        self._mixtures = [one for one in model.modules() if isinstance(one, MixtureOfExperts)] if plan.tensor else []
        self.experts = list(_links_of(plan, model)) if cell.expert > 1 else []
        """What ranks exchange that have some of the experts each, by chunk of their stage; empty if none are spread."""
        self.cuts = cuts_of(model, plan, cell)
        """By each name of every parameter that is cut."""
        self.outline: Mapping[str, Tensor] = {
            name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()
        }
        """All weights and buffers as they are in a whole model, without memory."""

    def take_place(self, place: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Keep the part of a place, of the weights that are there or of those that come, and begin to exchange."""
        assert (self.place is None and self.has_weights) or weights is not None, "a part is not cut again"
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        done: set[int] = set()
        with torch.no_grad():
            for name, tensor in weights or all_weights(self.model).items():
                if name in self.cuts and id(parameters[name]) not in done:
                    done.add(id(parameters[name]))
                    parameters[name].grad = None
                    parameters[name].data = self.cuts[name].part_of(tensor, place).to(parameters[name])
                elif weights is not None and name not in self.cuts:
                    self._take_whole(name, tensor, parameters.get(name))
        self.place = place
        self._begin_to_exchange()

    def _take_whole(self, name: str, tensor: Tensor, parameter: nn.Parameter | None) -> None:
        """Take what is not cut, into memory of its own where a parameter has none."""
        if parameter is not None and parameter.untyped_storage().nbytes() < parameter.nbytes:
            parameter.data = tensor.to(parameter.device, parameter.dtype, copy=True)
        else:
            (self.model.state_dict()[name] if parameter is None else parameter).copy_(tensor)

    def _begin_to_exchange(self) -> None:
        for links in self.experts:
            for one in links.units:
                one.links = links
        for mixture in self._mixtures:
            mixture.links = self.links
        if not self._hooks:
            self._hooks = list(hooks_of(self.model, self.plan, self.links))

    def become_part(self) -> None:
        """Go on with what a place kept when the model became whole, if it has, and exchange again."""
        if not self._parts:
            return
        parameters = dict(self.model.named_parameters())
        for name, part in self._parts.items():
            parameters[name].data = part
        self._parts = {}
        self._begin_to_exchange()

    def become_whole(self) -> None:
        """Make every parameter whole again, and exchange no more; all places of the cell call it."""
        parameters = dict(self.model.named_parameters())
        for name in self.cuts:
            if name in parameters:
                parameters[name].grad = None
                self._parts[name] = parameters[name].data
                parameters[name].data = self.whole(name, parameters[name])
        self._exchange_no_more()

    def _exchange_no_more(self) -> None:
        for one in self._spread:
            one.links = None
        for mixture in self._mixtures:
            mixture.links = None
        while self._hooks:
            self._hooks.pop().remove()

    @contextlib.contextmanager
    def without_peers(self) -> Iterator[None]:
        """Within this context, before the first place, compute what a tensor rank does, of all stages.

        Results are of no use, shapes and weights' strides are those of any world.
        """
        if not self.plan.tensor:
            yield
            return
        assert self.place is None and self.has_weights, "the model is whole"
        shape = Cell(tensor=self._degree)
        lone = CutModel(self.model, replace(self.plan, pieces=(), num_chunks=1), shape, CellLinks())
        lone.links.bind(LoneGroup(shape.tensor))
        whole = [(one, one.data) for one in self.model.parameters()]
        lone.take_place(0)
        try:
            yield
        finally:
            lone._exchange_no_more()
            for one, weights in whole:
                one.data = weights

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole of a cut parameter, or of another tensor of its shape; all places of the cell call it."""
        cut, group, parts = self.cuts[name], self.known_cell, list[Tensor]()
        for place in cut.givers:
            mine = cut.in_memory(tensor) if place == group.rank else None
            parts.append(tensor.new_empty(cut.part_shape(place).numel()) if mine is None else mine)
            group.broadcast(parts[-1], place)
        return cut.joined(parts)

    def by_chunk(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each chunk of a stage; those of other stages, without elements, are among them."""
        chunks = chunks_of(self.model, self.plan)
        return [
            [one for one in self.model.parameters() if chunks.get(id(one), 0) == chunk]
            for chunk in range(self.plan.num_chunks)
        ]

    def by_spread(self) -> Iterator[tuple[list[nn.Parameter], list[nn.Parameter]]]:
        """Yield by chunk the parameters that ranks with other experts have, too, and those of the experts."""
        spread = self.spread_weights()
        for chunk in self.by_chunk():
            yield [one for one in chunk if id(one) not in spread], [one for one in chunk if id(one) in spread]

    def spread_weights(self) -> set[int]:
        """Return which parameters are experts' that are dealt to ranks, by their ids."""
        return {id(one) for experts in self._spread for one in experts.parameters()}

    @property
    def known_cell(self) -> Group:
        """All places of the present world's cell."""
        assert self.cell is not None, "no cell has been formed"
        return self.cell

    def bind(self, mesh: Mesh, cell: Group) -> None:
        """Exchange with the ranks of this cell from now on; all of them call it."""
        self.cell = cell
        if self.experts:
            group = along_axis(cell, mesh, "expert")
            for one in self.experts:
                one.bind(group)
        if self.plan.tensor:
            self.links.bind(along_axis(cell, mesh, "tensor"))


def _experts_at(names: Sequence[str], model: nn.Module) -> list[Experts]:
    return [one for name in names if isinstance(one := model.get_submodule(name), Experts)]


def _links_of(plan: CellPlan, model: nn.Module) -> Iterator[ExpertLinks]:
    """Yield the links of each chunk's experts."""
    chunks, spread, again = chunks_of(model, plan), _experts_at(plan.experts, model), _experts_at(plan.again, model)
    for chunk in range(plan.num_chunks):
        yield ExpertLinks([one for one in spread if chunks.get(id(one.gate), 0) == chunk], again)


def along_axis(cell: Group, mesh: Mesh, axis: Axis) -> Group:
    """Return the ranks of a cell that differ from this one along an axis alone; all of them call it."""
    places = mesh.cell.along(mesh.place, axis)
    return cell if len(places) == mesh.cell.size else cell.part(f"{axis}-{places[0]}", places)
