"""Copies: where no rank holds all of a job's state, what has to be lost at once until a part of it is.

Every share has holders on as many nodes as there are copies, or as there are nodes that hold anything. So a world may
say that shares were lost only if so many nodes lost a member since the last world that had taken its seats. Ranks of
one place in all cells hold the same part, and so do neighbours that compute rows together: where cells hold the state,
all of them have to have been lost; or, where each holds a share of its part, as many as there are copies.
"""

from __future__ import annotations

from collections.abc import Mapping

from chaos.judge.evidence.applied import pids_of, restored_at
from chaos.judge.evidence.recovery_cost import seats_of
from chaos.judge.evidence.run_files import Evidence, number, once, part, whole
from chaos.judge.job_shape import cell_size, context_size, has_parts


def in_words(parallel: Mapping[str, object]) -> str:
    """Say what of a job's state is in shards, from its configuration."""
    what, size = parallel.get("shards", "none"), cell_size({"parallel": parallel})
    spread = None if what == "none" else f"{what} in shards, copies: {parallel.get('copies')}"
    if size > 1:
        return f"cells of {size} ranks" + (f", {spread}" if spread else "")
    return spread or "state whole on every rank"


def parallel_of(run: Evidence) -> dict[str, object]:
    """Return what a job's configuration says of shards; nothing if it is of before there were any."""
    return part(run.config, "parallel") if isinstance(run.config.get("parallel"), dict) else {}


def copies_of(run: Evidence) -> int | None:
    """Return in how many copies ranks hold a job's shards; None if each holds the whole state."""
    parallel = parallel_of(run)
    return whole(parallel, "copies") if parallel.get("shards", "none") != "none" else None


@once
def losses_of(run: Evidence) -> dict[int, int]:
    """Return how many shards each term says that nobody held any more, of the terms that say so."""
    lost: dict[int, int] = {}
    for line in run.of("restore"):
        if num_lost := line.get("lost"):
            lost.setdefault(whole(line, "term"), int(str(num_lost)))
    return lost


@once
def node_of(run: Evidence) -> dict[object, object]:
    """Return the node of each process that is known to be on one."""
    return {pid: line["node"] for line in run.of("node") for pid in line.get("pids") or ()}  # type: ignore[attr-defined]


def holders_gone(run: Evidence, term: int) -> tuple[int, int]:
    """Return how many nodes had lost a member when a term's world formed, and how many it takes to lose a share.

    Of cells: how many ranks with the part that most were lost with, and how many there were, or hold each share.

    Members count from the last world that began to train on: whoever was in it, or in one since, and is in the term's
    no more. One that wrote nothing counts as a node of its own, on either side: who died before its first line. Where
    all of them had been asked to leave and did, none counts: what they alone held they have committed. Before the first
    step there is nothing to commit; the others begin again with new first weights.
    """
    pids, nodes, seats = pids_of(run), node_of(run), seats_of(run)
    base = max((other for other in restored_at(run) if other < term), default=0)
    if has_parts(run.config):
        return _holders_of_a_part(run, base, term)
    since = {pid for other, members in pids.items() if base <= other < term for pid in members}
    unknown = sum(seats[other] - len(pids[other]) for other in pids if base <= other < term)
    lost = since - pids[term]
    gone = {nodes.get(pid, ("process", pid)) for pid in (lost if lost - _left(run) else ())}
    rank_of = {line["rank"]: line["pid"] for line in run.in_term("form", base)}
    holders = [line for line in run.in_term("restore", base) if not line.get("holds_nothing")]
    held_on = {nodes.get(pid := rank_of.get(line["rank"]), ("process", pid)) for line in holders}
    return len(gone) + unknown, min(copies_of(run) or 1, max(1, len(held_on)))


def _holders_of_a_part(run: Evidence, base: int, term: int) -> tuple[int, int]:
    """Return how many ranks of a world had been lost that held the part most were lost with, by when a term's formed,
    and how many had held it, or each share of it.

    Who held nothing yet when the world broke holds nothing now. Copies of a share are in different cells as far as
    there are any, so ranks of fewer cells do not make up one.
    """
    size, context = cell_size(run.config), context_size(run.config)
    rank_of = {whole(line, "pid"): whole(line, "rank") for line in run.in_term("form", base)}
    holds = {whole(line, "rank") for line in run.in_term("restore", base)}
    num_holders = seats_of(run).get(base, size) // size * context
    left = {rank for pid in pids_of(run)[term] if (rank := rank_of.get(pid)) in holds}
    needed, num_cells = min(copies_of(run) or num_holders, num_holders), num_holders // context
    is_apart = not any(line.get("holds_nothing") for line in run.in_term("restore", base))
    most = 0
    for first in range(0, size, context):  # the places with each part
        gone = [n for n in range(num_holders) if n // context * size + first + n % context not in left]
        is_enough = len({number // context for number in gone}) >= min(needed, num_cells) or not is_apart
        most = max(most, len(gone) if is_enough else min(len(gone), needed - 1))
    return most, needed


@once
def _left(run: Evidence) -> set[object]:
    """Return the processes that have left a world as they were asked to, once there was a step to commit."""
    pids = {(line["term"], line["rank"]): line["pid"] for line in run.of("form")}
    return {pids.get((line["term"], line["rank"])) for line in run.of("leave") if whole(line, "step")}


def is_told_again(run: Evidence, term: int) -> bool:
    """Say whether the world before had lost shares, too, and applied no step: a term's loss is that one's, then.

    A rank that was away may still hold a part of the steps that were given up there.
    """
    base = max((other for other in restored_at(run) if other < term), default=0)
    return base in losses_of(run) and not list(run.in_term("step", base))


def is_begun_anew(run: Evidence, term: int) -> bool:
    """Say whether a term's world ended as it had lost shares, and there was no commit yet to continue from."""
    if (copies_of(run) is None and not has_parts(run.config)) or term in restored_at(run):
        return False
    formed = min(number(line, "t") for line in run.in_term("form", term))
    if any(number(line, "t") < formed for line in run.of("commit")):
        return False
    gone, needed = holders_gone(run, term)
    return gone >= needed
