"""The modelled state of a rank that has a place in a cell: that place's part of the weights, by the product's rules.

What is modelled are the tensors. Which part a rank has, takes, gives, compares, writes and reads, and what becomes of a
step that its world has left, is what `elastic_train.job.cells` and `elastic_train.job.reseating` say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from chaos.sim.machine.rank_group import SimGroup
from chaos.sim.modelled.training import CUT_DIMS, WORDS, ModelledState, Weights
from elastic_train.checkpoint.format.layout import State
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.core.keyed_random import derive
from elastic_train.core.mesh import Mesh
from elastic_train.job.cells.cell_state import CellState, Measured
from elastic_train.job.cells.cut_model import Cut
from elastic_train.job.state import Pending, Reached, StepFacts
from elastic_train.shards.grains import cut_along

_EXACT = (1 << 52) - 1
"""Integers up to here are floats of their own."""


class CutWeights:
    """What `CutModel` is to its users: the parts of the digest are cut, and the counts are not."""

    experts = None
    has_weights = True

    def __init__(self, weights: Weights) -> None:
        self._weights, size = weights, len(weights.parts)
        spans = tuple((WORDS * place, WORDS * (place + 1)) for place in range(size))
        shape = torch.Size([WORDS * size])
        self.cuts: Mapping[str, Cut] = {"digest": Cut(0, shape, spans, cut_along(shape, 0))}
        self.plan = SimpleNamespace(dims=CUT_DIMS)
        self.outline = {name: torch.empty_like(one, device="meta") for name, one in weights.state_dict().items()}
        self.place: int | None = None
        self.cell: SimGroup | None = None

    @property
    def known_cell(self) -> SimGroup:
        assert self.cell is not None, "no cell has been formed"
        return self.cell

    def bind(self, mesh: Mesh, cell: SimGroup) -> None:
        self.cell = cell

    def take_place(self, place: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        whole = self._weights.state_dict() if weights is None else dict(weights)
        self._weights.counts = whole["counts"].numpy().copy()
        self._weights.words = self.cuts["digest"].part_of(whole["digest"], place).numpy()
        self._weights.parts = range(place, place + 1)
        self.place = place

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        return self.known_cell.all_gather(tensor).flatten()

    def become_part(self) -> None:
        if self.place is not None and len(self._weights.parts) > 1:
            self._weights.words = self.cuts["digest"].part_of(self._weights.state_dict()["digest"], self.place).numpy()
            self._weights.parts = range(self.place, self.place + 1)

    def become_whole(self) -> None:
        self._weights.words = self.whole("digest", self._weights.state_dict()["digest"]).numpy()
        self._weights.parts = range(self.known_cell.size)


@dataclass(slots=True, kw_only=True)
class ModelledParts(CellState):
    """A place's part of the modelled weights; there are no moments."""

    def _first_moments(self) -> State:
        return {}

    model: Weights  # type: ignore[assignment]  # it has all that is asked of one

    def held(self) -> State:
        return {"model": self.model.state_dict(), "optimizer": {"state": {}}}

    def stillness(self) -> Callable[[StatePath], bool]:
        """Only `apply` changes anything."""
        return lambda path: True

    def measure(self) -> Tensor:
        """Return a grain of what all places hold, and one of this place's part."""
        gradient = self.model.gradient
        assert gradient is not None, "a step has a gradient"
        [part] = self.model.parts
        numbers = gradient.digest & _EXACT, derive(gradient.digest, part) & _EXACT
        return torch.tensor(numbers, dtype=torch.float64)

    def take(self, fill: Callable[[State], None], *, keeps_rates: bool = False) -> None:
        tree: State = {"model": self.model.state_dict()}
        self._fill_parts(tree, fill)
        model = tree["model"]
        assert isinstance(model, dict), "as it was saved"
        self.model.words, self.model.counts = model["digest"].numpy().copy(), model["counts"].numpy().copy()


@dataclass
class PlacedState(ModelledState):
    """What `AppliedState` is to its users where cells hold the model."""

    parts: ModelledParts | None = None
    pending: Pending | None = None

    @property
    def shards(self) -> ModelledParts:  # type: ignore[override]  # what a place holds is not all
        assert self.parts is not None, "it was built with them"
        return self.parts

    def measure(self) -> Tensor:
        return self.shards.measure()

    def hold(self, facts: StepFacts, measured: Tensor) -> None:
        self.pending = Pending(facts, measured)

    def drop_pending(self) -> None:
        self.pending = None

    def begin_again(self) -> None:
        self.drop_pending()
        self.reached = Reached()

    def apply(self, facts: StepFacts, norm: Tensor) -> None:
        self.pending = None
        super().apply(facts, norm)

    def restore(self, fill: Callable[[State], None], reached: Reached, *, keeps_rates: bool = False) -> None:
        self.shards.take(fill)
        self.reached = reached


def placed_state(weights: Weights) -> PlacedState:
    """Return the state of a rank that no world has given a place yet, around the whole of the first weights."""
    size = len(weights.parts)
    nothing = SimpleNamespace(state={})
    parts = ModelledParts(
        model=weights,
        optimizer=nothing,  # type: ignore[arg-type]  # it keeps nothing
        scheduler=None,  # type: ignore[arg-type]  # nothing asks for it
        scaler=None,  # type: ignore[arg-type]
        memory=None,  # type: ignore[arg-type]
        first=None,  # type: ignore[arg-type]
        cut=CutWeights(weights),  # type: ignore[arg-type]  # as far as it is used
    )
    parts._measured = _grains(size)
    return PlacedState(weights, parts=parts)


def _grains(size: int) -> dict[str, Sequence[Measured]]:
    """Return which of a place's two grains are whose: the first is held by all places alike."""
    return {
        "counts": [Measured(slice(0, 1), 0) for _ in range(size)],
        "digest": [Measured(slice(1, 2), place) for place in range(size)],
    }
