"""The modelled state of a rank: its shard of the weights, by the product's rules.

Only tensors are modelled. `elastic_train.job` decides which shard a rank holds, receives, sends, compares, writes and
reads, and what happens to a step whose world is abandoned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from chaos.sim.machine.rank_group import SimGroup
from chaos.sim.modelled.training import CUT_DIMS, WORDS, Weights
from elastic_train.checkpoint.format.layout import State
from elastic_train.core.keyed_random import derive
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.job.cells.cell_plan import CellPlan
from elastic_train.job.cells.cut_model import Cut
from elastic_train.job.sharded.held_tree import Cuts
from elastic_train.job.sharded.share import Share
from elastic_train.job.state import Pending, StepFacts, TrainProgress, contribution_of
from elastic_train.job.state_shards import CommitPieces, Place, StateShards
from elastic_train.parallel.gradient_sum import OfPart
from elastic_train.placement.grains import Listed, cut_along, lay_out
from elastic_train.placement.holdings import Column
from elastic_train.placement.table import Parts, Table

_EXACT = (1 << 52) - 1
"""Largest integer that a float64 represents exactly here."""


class CutWeights:
    """Stand-in for `CutModel`: the digest is split over the places of a cell, the counts are not."""

    experts = None
    has_weights = True

    def __init__(self, weights: Weights, size: int) -> None:
        self._weights = weights
        spans = tuple((WORDS * place, WORDS * (place + 1)) for place in range(size))
        shape = torch.Size([WORDS * size])
        self.cuts: Mapping[str, Cut] = {}
        if size > 1:
            self.cuts = {"digest": Cut(0, shape, spans, cut_along(shape, 0))}
        self.plan = CellPlan(dims=CUT_DIMS)
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
        if self.cuts and self.place is not None and len(self._weights.parts) > 1:
            self._weights.words = self.cuts["digest"].part_of(self._weights.state_dict()["digest"], self.place).numpy()
            self._weights.parts = range(self.place, self.place + 1)

    def become_whole(self) -> None:
        self._weights.words = self.whole("digest", self._weights.state_dict()["digest"]).numpy()
        self._weights.parts = range(self.known_cell.size)


class ModelledShare(Share):
    """A whole shard of the modelled weights, without moments."""

    def __init__(self, weights: Weights, table: Table, kept: State) -> None:
        """`kept` is the optimizer's state of the shard."""
        nothing = SimpleNamespace(param_groups=[], state={})
        super().__init__(weights, nothing, None, None, table, None, None)  # type: ignore[arg-type]  # never asked
        self._weights, self._kept = weights, kept

    def held(self) -> State:
        return {"model": self._weights.state_dict(), **self._kept}

    def take(self, fill: Callable[[State], None], cuts: Cuts, place: int, *, keeps_rates: bool) -> None:
        tree = self.held()
        if cuts:
            tree = self._filled_parts(tree, fill, cuts, place)
        else:
            fill(tree)
        self._take(tree, keeps_rates=keeps_rates)

    def _take(self, tree: Mapping[str, Any], *, keeps_rates: bool) -> None:
        model = tree["model"]
        assert isinstance(model, dict), "as it was saved"
        self._weights.words, self._weights.counts = model["digest"].numpy().copy(), model["counts"].numpy().copy()

    def _first_moments(self) -> State:
        return {}

    def measure(self) -> Tensor:
        """Return stand-in norms, one for this place's shard; empty for whole weights, which need none."""
        gradient = self._weights.gradient
        assert gradient is not None, "a step has a gradient"
        if len(self._weights.parts) == self._weights.size:
            return torch.zeros(0, dtype=torch.float64)
        [part] = self._weights.parts
        counts, digest = (len(tensor.grains) for tensor in self.layout.tensors)
        of_counts, of_digest = gradient.digest & _EXACT, derive(gradient.digest, part) & _EXACT
        numbers = of_counts, *[0] * (counts - 1), of_digest, *[0] * (digest - 1)
        return torch.tensor(numbers, dtype=torch.float64)

    def weights_at(self, number: int, lo: int, hi: int) -> Tensor:
        return self._weights.state_dict()[self.layout.tensors[number].names[0]][lo:hi]

    def tensors(self) -> Iterator[OfPart]:
        return iter(())


class Rate:
    """Stand-in for a learning rate schedule."""

    def get_last_lr(self) -> list[float]:
        return [1.0]


@dataclass
class ModelledState:
    """Stand-in for `elastic_train.job.state.AppliedState`."""

    model: Weights
    shards: StateShards
    reached: TrainProgress = field(default_factory=TrainProgress)
    pending: Pending | None = None
    scheduler: Rate = field(default_factory=Rate)
    outline: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    recipe: None = None
    changes: None = None
    compiled: None = None
    layout: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(dims=CUT_DIMS))
    pieces: CommitPieces = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = CommitPieces(self.shards)

    @property
    def step(self) -> int:
        return self.reached.step

    @property
    def place(self) -> Place:
        return Place(self.reached.step, self.reached.term)

    def measure(self) -> Tensor:
        return contribution_of(self.shards.table, self.shards.share.measure())

    def hold(self, facts: StepFacts, measured: Tensor) -> None:
        self.pending = Pending(facts, measured)

    def drop_pending(self) -> None:
        self.pending = None

    def begin_again(self) -> None:
        self.drop_pending()
        self.reached = TrainProgress()

    def apply(self, facts: StepFacts, norm: Tensor) -> None:
        self.pending = None
        is_finite = math.isfinite(facts.loss)
        if is_finite:
            self.model.advance(self.step)
        self.model.gradient = None
        self.reached = self.reached.advance(facts, float(norm), is_finite=is_finite, is_skipped=not is_finite)

    def adopt(self, alike: State, reached: TrainProgress) -> None:
        self.shards.share.take_common(alike)
        self.reached = reached

    def restore(self, fill: Callable[[State], None], reached: TrainProgress, *, keeps_rates: bool = False) -> None:
        shards = self.shards
        shards.share.take(fill, shards.cut.cuts, shards.table.place, keeps_rates=False)
        self.reached = reached


def modelled_state(weights: Weights, cell: Cell) -> ModelledState:
    """Return the initial state of a rank without a place, around the whole initial weights."""
    kept: State = {"optimizer": {"state": {}}} if cell.holds_parts else {}
    shards = StateShards(
        cut=CutWeights(weights, cell.num_parts),  # type: ignore[arg-type]  # as far as it is used
        at_first=Table(_parts(len(weights.counts), weights.size, cell.num_parts), cell=cell),
        hold=lambda table: ModelledShare(weights, table, kept),
    )
    return ModelledState(weights, shards)


@lru_cache(64)
def _parts(num_rows: int, size: int, num_parts: int) -> Parts:
    """Return the tensors that each place holds: the counts, and one shard of a digest of `size` shards, or all."""
    counts = Listed("counts", (num_rows,), "torch.int64")
    cut = cut_along((WORDS * size,), 0)
    assert cut is not None, "it is cut"
    length = WORDS * size // num_parts
    starts = range(0, WORDS * size, length)
    parts = (Listed("digest", (length,), "torch.int64", cut=cut.part(start, start + length)) for start in starts)
    return Parts(
        lay_out((counts, Listed("digest", (WORDS * size,), "torch.int64", cut=cut))),
        [Column(lay_out((counts, part))) for part in parts],
        {"digest": starts},
        ("counts", "digest"),
    )
