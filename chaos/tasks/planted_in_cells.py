"""Plant bugs in model parallelism, in the training processes: a wrong lane, a wrong shard, or a missed step.

None shows in a single replica without faults, so the fault-free run gives the correct result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from chaos.tasks.paced_language import PacedLanguage
from elastic_train.core.mesh import Mesh
from elastic_train.core.mixture import RunOrder
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.job import reshard
from elastic_train.job.sample_streams import Feed
from elastic_train.job.state import AppliedState, StepFacts
from elastic_train.job.state_shards import Weights
from elastic_train.parallel.group import Group
from elastic_train.tracking.history import History
from elastic_train.training import open_session
from rendezvous.membership.records import Member
from rendezvous.membership.rules import admission, cells
from rendezvous.membership.rules.cells import Arrangement, CellShape
from rendezvous.membership.worlds import World


class BuggyLanguage(PacedLanguage):
    """The paced language model in a process with a planted bug: `plant` is a name in `BUGS`."""

    def __init__(self, plant: str, **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        if plant not in BUGS:
            raise ValueError(f"no bug '{plant}'; there are {', '.join(BUGS)}")
        BUGS[plant]()


def two_cells_with_one_lane() -> None:
    """Let every replica but the first compute, and report, the lane before each of its own."""
    training, said = Feed.training, History.step

    def one_before(lanes: range) -> range:
        return range(lanes.start - 1, lanes.stop - 1) if lanes.start else lanes

    def others(feed: Feed, order: RunOrder, lanes: range, *rest: Any) -> Iterator[Sequence[LaneBatch]]:
        for batches in training(feed, order, one_before(lanes), *rest):
            yield [replace(batch, lane=lane) for batch, lane in zip(batches, lanes, strict=True)]

    def say(history: History, *, lanes: range, **step: Any) -> None:
        said(history, lanes=one_before(lanes), **step)

    Feed.training = others  # type: ignore[method-assign, assignment]
    History.step = say  # type: ignore[method-assign, assignment]


def neighbours_part() -> None:
    """Reverse the ranks of a refilled replica, whose survivors then use their old shards at their new ranks."""
    arrange, take_place = cells.arrange, reshard.take_place

    def arrange_crossed(
        members: Sequence[Member], shape: CellShape, last: World | None, most: int | None = None
    ) -> Arrangement:
        found = arrange(members, shape, last, most)
        if last is None:
            return found
        stays = [all(last.rank_of(one.id) is not None for one in cell) for cell in found.cells]
        return replace(
            found, cells=tuple(cell[:: 1 if stay else -1] for cell, stay in zip(found.cells, stays, strict=True))
        )

    def keep_part(state: AppliedState, mesh: Mesh, cell: Group | None, first: Callable[[], Weights]) -> bool:
        if state.shards.cut.place is not None:
            state.shards.cut.place = mesh.place
        return take_place(state, mesh, cell, first)

    vars(admission)["arrange"] = arrange_crossed
    vars(open_session)["take_place"] = keep_part


def stage_misses_a_step() -> None:
    """Let model-parallel rank 1 count the first step after a fault as applied without updating its weights."""
    apply, counted = AppliedState.apply, set[int]()

    def apply_or_miss(state: AppliedState, facts: StepFacts, norm: Tensor) -> None:
        if state.shards.table.place != 1 or facts.term == 1 or facts.term in counted:
            apply(state, facts, norm)
            return
        counted.add(facts.term)
        parts = {name: one for name, one in state.model.state_dict().items() if name in state.shards.cut.cuts}
        before = {name: tensor.clone() for name, tensor in parts.items()}
        apply(state, facts, norm)
        for name, tensor in parts.items():
            tensor.copy_(before[name])

    AppliedState.apply = apply_or_miss  # type: ignore[method-assign, assignment]


BUGS: dict[str, Callable[[], None]] = {
    "two-cells-with-one-lane": two_cells_with_one_lane,
    "neighbours-part": neighbours_part,
    "stage-misses-a-step": stage_misses_a_step,
}
