"""Take a rank's place in a cell, and describe the redundancy that results."""

from __future__ import annotations

from elastic_train.core.mesh import Mesh
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState
from elastic_train.parallel.group import Group
from elastic_train.placement.table import Table
from elastic_train.system.wording import counted


def take_place(plan: Plan, state: AppliedState, mesh: Mesh, cell: Group | None) -> None:
    """Take the place that a world assigns to this rank; drop its state if it belongs to another part.

    `cell` has the ranks of this rank's cell, None if it is alone.
    """
    if state.shards.enter(mesh, cell, plan.first_weights):
        state.begin_again()


def redundancy_of(mesh: Mesh, table: Table) -> str | None:
    """Describe the cost of a fault, given how many ranks hold the same state; None if each holds all of it alone."""
    context = mesh.cell.context
    num_ranks = counted(mesh.cell.size, "rank")
    if not table.is_whole and (mesh.cell.size == 1 or mesh.size > mesh.cell.num_parts):
        what = "state" if table.shares_weights else "optimizer's state"
        if mesh.cell.size > 1:
            of_each = " of each place" if context == 1 else " of each part" if mesh.cell.holds_parts else ""
            held = f"{counted(mesh.num_replicas, 'cell')} of {num_ranks}, over which the {what}{of_each} is held"
        else:
            held = f"the {what} is held"
        if table.num_copies == 1:
            return (
                f"{held} once: if a rank is lost, its share is lost, and the job resumes from the newest commit "
                "(set parallel.copies, or use more ranks)"
            )
        return f"{held} {table.num_copies} times: a fault that leaves one of the holders costs no applied step"
    if mesh.cell.size == 1:
        return None
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
            f"{num_ranks} make one cell, the only holder of the state: if a rank is lost, its part is lost, and the "
            "job resumes from the newest commit (more nodes make more cells)"
        )
    return (
        f"{mesh.num_replicas} cells of {num_ranks}: a fault that leaves each part of the state in one of them costs no "
        "applied step"
    )
