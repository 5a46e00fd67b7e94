"""A model of which each rank of a cell keeps a part: rows or columns of its matrices, or a stage's modules.

A task's placements say how each module is cut (`cell_plan`). Parameters remain the same objects with fewer elements, or
none, so optimizer and hooks are unaffected. Hooks around the modules do the exchange between tensor-parallel ranks
(Shoeybi et al. 2019). Parameters that are not cut are replicated, and their gradients are bit-identical on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from elastic_train.core.mesh import Axis, Cell, Mesh
from elastic_train.errors import ConfigError
from elastic_train.job.cells.cell_plan import CellPlan, cut_parameters
from elastic_train.job.cells.layer_hooks import Hook, hooks_of
from elastic_train.job.model_layout import Laid
from elastic_train.parallel.cells.expert_links import ExpertLinks
from elastic_train.parallel.cells.links import CellLinks, LoneGroup
from elastic_train.parallel.devices.squares import in_memory_order
from elastic_train.parallel.group import Group
from elastic_train.placement import grains as shards
from elastic_train.tasks.decoder.experts import Experts, MixtureOfExperts

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of a parameter of `shape` along `dim`; each place has a span [lo, hi), possibly empty.

    `whole` gives the boundaries that grains of the whole tensor may not cross; None if it is never cut. A place stores
    its part with `dim` first, so that it is one run of the whole tensor's elements in memory order.
    """

    dim: int
    shape: torch.Size
    spans: tuple[Span, ...]
    whole: shards.Cut | None = None

    def part_shape(self, place: int) -> torch.Size:
        """Return the shape of a place's part."""
        lo, hi = self.spans[place]
        return torch.Size(hi - lo if dim == self.dim else size for dim, size in enumerate(self.shape))

    def part(self, place: int) -> Laid:
        """Return the shape of a place's part, and the boundaries that its grains may not cross."""
        lo, hi = self.spans[place]
        return Laid(self.part_shape(place), None if self.whole is None or lo == hi else self.whole.part(lo, hi))

    def run(self, place: int) -> Span:
        """Return the range of the whole tensor's elements that a place has, in memory order."""
        row = self.shape.numel() // max(1, self.shape[self.dim])
        lo, hi = self.spans[place]
        return lo * row, hi * row

    def part_of(self, whole: Tensor, place: int) -> Tensor:
        """Return a copy of a place's part of the whole tensor."""
        lo, hi = self.spans[place]
        part = whole.movedim(self.dim, 0)[lo:hi].clone(memory_format=torch.contiguous_format)
        return part.movedim(0, self.dim)

    def in_memory(self, part: Tensor) -> Tensor:
        """Return the elements of a place's part in memory order, 1-D; a view if the part is stored that way."""
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
        """Return the first place with the same part as `place`; None if `place` has none."""
        lo, hi = self.spans[place]
        return self.spans.index((lo, hi)) if lo < hi else None

    @property
    def is_in_parts(self) -> bool:
        """True if some place has a proper part of the tensor."""
        return any(0 < hi - lo < self.shape[self.dim] for lo, hi in self.spans)

    @property
    def givers(self) -> list[int]:
        """The places whose parts make up the whole, in order of the parts; of places with equal parts, the first."""
        return [place for place in range(len(self.spans)) if self.first_with(place) == place]


def cuts_of(model: nn.Module, plan: CellPlan, cell: Cell) -> Mapping[str, Cut]:
    """Return how parameters are cut, by each of their names; in a pipeline every parameter is.

    Raises ConfigError if a parameter is cut along another dimension than the plan gives for all degrees.
    """
    along: dict[int, tuple[int, Sequence[Axis]]] = {}
    for name in plan.experts:
        along |= {id(one): (0, ("tensor", "expert")) for one in model.get_submodule(name).parameters()}
    for name, use in plan.tensor.items():
        for one, dim in cut_parameters(model.get_submodule(name), use):
            along[id(one)] = dim, ("tensor",)
    stages: dict[int, set[int]] = {}
    for one, piece in pieces_of(model, plan):
        stages.setdefault(id(one), set()).add(piece % plan.num_stages)
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
    """Yield the parameters of a pipeline, each with its piece; a tied one with each of its pieces."""
    for piece, modules in enumerate(plan.pieces):
        for name in modules:
            for one in model.get_submodule(name).parameters():
                yield one, piece


def chunks_of(model: nn.Module, plan: CellPlan, stage: int = 0) -> Mapping[int, int]:
    """Return the chunk that each parameter is in, by id; empty without a pipeline. `stage` decides for tied ones."""
    found = dict[int, int]()
    for one, piece in pieces_of(model, plan):
        if id(one) not in found or piece % plan.num_stages == stage:
            found[id(one)] = piece // plan.num_stages
    return found


def _spans(
    shape: Sequence[int], dim: int, axes: Sequence[Axis], stages: Container[int] | None, cell: Cell
) -> tuple[Span, ...]:
    """Return the index range of a dimension that each place has: cut along some axes, or held whole by some stages."""
    spans = list[Span]()
    for place in range(cell.size):
        number, degree = 0, 1
        for axis in axes:
            at, count = cell.number_along(place, axis)
            number, degree = number * count + at, degree * count
        length = (shape[dim] if shape else 1) // degree
        is_here = stages is None or cell.number_along(place, "stage")[0] in stages
        spans.append((number * length, (number + 1) * length) if is_here else (0, 0))
    return tuple(spans)


def all_weights(model: nn.Module) -> Mapping[str, Tensor]:
    """Return all weights and saved buffers, by each of their names, including frozen weights that commits omit."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **model.state_dict()}


class CutModel:
    """A model and its cuts; whole, or on the meta device, until `take_place`."""

    def __init__(self, model: nn.Module, plan: CellPlan, cell: Cell, links: CellLinks) -> None:
        self.model, self.plan, self.links = model, plan, links
        self._shape = cell
        self.place: int | None = None
        self.cell: Group | None = None
        """All places, by number; `links` reach only the tensor-parallel peers."""
        self.has_weights = all(one.untyped_storage().nbytes() or not one.nbytes for one in model.parameters())
        """True if the model had memory for its weights at the start."""
        self._hooks = list[Hook]()
        self._parts = dict[str, Tensor]()
        """This place's parts, kept while the model is whole."""
        self._spread = _experts_at(plan.experts, model)
        self._mixtures = [one for one in model.modules() if isinstance(one, MixtureOfExperts)] if plan.tensor else []
        self.experts = list(_links_of(plan, model)) if cell.expert > 1 else []
        """Exchanges between ranks with different experts, by chunk of their stage; empty if experts are not spread."""
        self.cuts = cuts_of(model, plan, cell)
        """Cut of each parameter, by each of its names."""
        self.outline: Mapping[str, Tensor] = {
            name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()
        }
        """All weights and buffers with the shapes of the whole model, without memory."""

    def take_place(self, place: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Keep only a place's part of the current or the given weights, and install the exchange hooks."""
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
        """Copy a tensor that is not cut; allocate memory if the parameter has none."""
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
        """Restore the parts kept by `become_whole`, if any, and the exchange hooks."""
        if not self._parts:
            return
        parameters = dict(self.model.named_parameters())
        for name, part in self._parts.items():
            parameters[name].data = part
        self._parts = {}
        self._begin_to_exchange()

    def become_whole(self) -> None:
        """Gather every parameter into whole tensors and remove the exchange hooks; collective over the cell."""
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
        """Compute as one tensor rank would, with all stages and without peers, before a place is taken.

        The results are meaningless; shapes and strides are those of any world.
        """
        if not self.plan.tensor:
            yield
            return
        assert self.place is None and self.has_weights, "the model is whole"
        shape = Cell(tensor=self._shape.tensor)
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
        """Return a cut parameter, or another tensor of its shape, as a whole; collective over the cell."""
        cut, group, parts = self.cuts[name], self.known_cell, list[Tensor]()
        for place in cut.givers:
            mine = cut.in_memory(tensor) if place == group.rank else None
            parts.append(tensor.new_empty(cut.part_shape(place).numel()) if mine is None else mine)
            group.broadcast(parts[-1], place)
        return cut.joined(parts)

    def by_chunk(self, place: int | None = None) -> list[list[nn.Parameter]]:
        """Return the parameters of each chunk of a place's stage, by default this one's, including empty ones of other
        stages."""
        place = self.place if place is None else place
        chunks = chunks_of(self.model, self.plan, self._shape.number_along(place or 0, "stage")[0])
        return [
            [one for one in self.model.parameters() if chunks.get(id(one), 0) == chunk]
            for chunk in range(self.plan.num_chunks)
        ]

    def by_spread(self) -> Iterator[tuple[list[nn.Parameter], list[nn.Parameter]]]:
        """Yield, by chunk, the parameters shared by ranks with different experts, and the experts' parameters."""
        spread = self.spread_weights()
        for chunk in self.by_chunk():
            yield [one for one in chunk if id(one) not in spread], [one for one in chunk if id(one) in spread]

    def spread_weights(self) -> set[int]:
        """Return the ids of the parameters of spread experts."""
        return {id(one) for experts in self._spread for one in experts.parameters()}

    @property
    def known_cell(self) -> Group:
        """All places of the current cell."""
        assert self.cell is not None, "no cell has been formed"
        return self.cell

    def bind(self, mesh: Mesh, cell: Group) -> None:
        """Exchange with the ranks of this cell from now on; collective over the cell."""
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
    """Return the ranks of a cell that differ from this one along one axis only; collective over the cell."""
    places = mesh.cell.along(mesh.place, axis)
    return cell if len(places) == mesh.cell.size else cell.part(f"{axis}-{places[0]}", places)
