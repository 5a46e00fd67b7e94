"""Rollbacks: a process whose steps are discarded by its world reports their number.

With sharded state, a world may discard steps because a shard is lost: with all nodes that held it, never with fewer
(`copies`).

In `live` mode a process may have been frozen while others continued and published. Histories record each process's
steps and what its next world continued with: the process must report the same.
"""

from __future__ import annotations

from chaos.judge.evidence.applied import branch_of, pids_of, reached_by
from chaos.judge.evidence.copies import copies_of, holders_gone, is_told_again, losses_of
from chaos.judge.evidence.run_files import Evidence, Line, whole
from chaos.judge.findings import Violated
from chaos.judge.job_shape import cell_size, has_parts

Branch = list[tuple[int, int, int]]


def check_rollbacks(run: Evidence) -> None:
    """Compare the steps that processes reported as discarded with those that they discarded.

    A state received in a world that broke before its restore is unknown: a process may report it later.
    """
    pids = {(whole(line, "term"), whole(line, "rank")): whole(line, "pid") for line in run.of("form")}
    rollbacks, restores = _by_pid(run, "rollback", pids), _by_pid(run, "restore", pids)
    had: dict[int, tuple[int, int]] = {}
    unsure: set[int] = set()
    for term, members in sorted(pids_of(run).items()):
        for pid in members:
            line = restores.get((term, pid))
            if line is None:
                unsure.add(pid)
                continue
            if pid in had and pid not in unsure:
                _check(run, had[pid], line, rollbacks.get((term, pid)), pid)
            unsure.discard(pid)
            had[pid] = term, reached_by(run).get((term, pid), whole(line, "step"))


def _by_pid(run: Evidence, op: str, pids: dict[tuple[int, int], int]) -> dict[tuple[int, int], Line]:
    places = [((whole(line, "term"), whole(line, "rank")), line) for line in run.of(op)]
    return {(place[0], pids[place]): line for place, line in places if place in pids}


def _check(run: Evidence, before: tuple[int, int], restore: Line, rollback: Line | None, pid: int) -> None:
    term, step = whole(restore, "term"), whole(restore, "step")
    kept = _in_common(branch_of(run, *before), branch_of(run, term, step))
    said = None if rollback is None else (whole(rollback, "from_step"), whole(rollback, "to_step"))
    if said != ((before[1], kept) if kept < before[1] else None):
        says = "nothing" if said is None else f"steps {said[0]} down to {said[1]}"
        had = f"process {pid} had step {before[1]} in term {before[0]}, of which term {term} kept {kept}"
        raise Violated(f"{had}: it reports that it gave up {says}")


def _in_common(one: Branch, other: Branch) -> int:
    """Return how many steps two branches share."""
    step = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine[0] != theirs[0] or mine[1] != theirs[1]:
            break
        step = min(mine[2], theirs[2])
        if mine[2] != theirs[2]:
            break
    return step


def copies(run: Evidence) -> str:
    """A world that lost shards had lost at least as many nodes as hold each; all other worlds lost none.

    In cells: a parameter shard is lost only with all ranks that held it.
    """
    cell, is_in_cells = cell_size(run.config), has_parts(run.config)
    for term, num_lost in sorted(losses_of(run).items()):
        gone, needed = holders_gone(run, term)
        if gone < needed and not is_told_again(run, term):
            since = "since the last world that trained"
            nodes = f"{gone} nodes had left {since}: with {copies_of(run)} copies it takes {needed}"
            cells = f"at most {gone} of {needed} holders of one part were gone {since}"
            raise Violated(
                f"term {term} found {num_lost} shards of the state lost, and {cells if is_in_cells else nodes}"
            )
    of_cells, num_copies = f"cells of {cell} ranks" if is_in_cells else "", copies_of(run)
    held = " with ".join(filter(None, (of_cells, f"{num_copies} copies" if num_copies is not None else "")))
    return f"{held}; {len(losses_of(run))} worlds had lost shards, each with all of their holders"


def is_sharded(run: Evidence) -> bool:
    """Return True if no rank held the job's whole state."""
    return copies_of(run) is not None or has_parts(run.config)
