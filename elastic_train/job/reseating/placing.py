"""Taking a place in a cell, and what that says of faults to come."""

from __future__ import annotations

from elastic_train.core.mesh import Mesh
from elastic_train.job.cells.cell_state import CellState
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState
from elastic_train.parallel.group import Group
from elastic_train.system.wording import counted


def take_place(plan: Plan, state: AppliedState, mesh: Mesh, cell: Group, holders: Group) -> None:
    """Take the place in a cell that a world gives this rank; what it held of another part is of no use there.

    `holders` are the ranks that hold the same part.
    """
    assert isinstance(state.shards, CellState), "the ranks of this cell hold parts"
    cut, holds_it = state.shards.cut, state.shards.holds_part_of(mesh)
    if cut.place is not None and not holds_it:
        state.begin_again()
    has_them = holds_it or (cut.place is None and cut.has_weights)
    state.shards.enter(mesh, cell, holders, None if has_them else plan.first_weights())


def redundancy_of(mesh: Mesh, num_copies: int | None = None, what: str = "state") -> str:
    """Say what a fault will cost, by how many cells hold the state, or how many ranks each share of a place's part.

    `what` is that of which ranks hold shares.
    """
    num_ranks, context = counted(mesh.cell.size, "rank"), mesh.cell.context
    if num_copies is not None and (mesh.num_replicas > 1 or context > 1):
        of_each = " of each place" if context == 1 else " of each part" if mesh.cell.holds_parts else ""
        held = f"{counted(mesh.num_replicas, 'cell')} of {num_ranks}, over which the {what}{of_each} is held"
        if num_copies == 1:
            return (
                f"{held} once: a rank that is lost takes its share along, and the job goes on from the newest commit "
                "(parallel.copies)"
            )
        return f"{held} {num_copies} times: a fault that leaves one of the holders costs no applied step"
    if not mesh.cell.holds_parts:
        return (
            f"{counted(mesh.num_replicas, 'cell')} of {num_ranks}, which compute each row together: every rank holds "
            "the whole state, so a fault that leaves one of them costs no applied step"
        )
    if mesh.num_replicas == 1 and context > 1:
        return (
            f"{num_ranks} make one cell, and {context} hold each part of the state: a fault that leaves one "
            "of these costs no applied step"
        )
    if mesh.num_replicas == 1:
        return (
            f"{num_ranks} make one cell, which alone holds the state: a rank that is lost takes its part along, and "
            "the job goes on from the newest commit (more nodes make more cells)"
        )
    return (
        f"{mesh.num_replicas} cells of {num_ranks}: a fault that leaves each part of the state in one of them costs no "
        "applied step"
    )
