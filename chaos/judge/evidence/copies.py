"""Copies: how many nodes must be lost at once before a shard of the state is lost.

Each shard has holders on as many nodes as there are copies, or as hold anything. So a world may report lost shards only
if that many nodes lost a member since the last world that had resharded. Ranks at one place in all cells hold the same
parameter shard, as do their context-parallel peers: in cells, all of them must be lost; or, with sharded optimizer
state, as many as there are copies.
"""

from __future__ import annotations

from collections.abc import Mapping

from chaos.judge.evidence.applied import pids_of, restored_at
from chaos.judge.evidence.recovery_cost import seats_of
from chaos.judge.evidence.run_files import Evidence, number, once, part, whole
from chaos.judge.findings import unless_broken
from chaos.judge.job_shape import cell_size, context_size, has_parts


def in_words(parallel: Mapping[str, object]) -> str:
    """Describe from its configuration how a job's state is sharded."""
    what, size = parallel.get("shards", "none"), cell_size({"parallel": parallel})
    spread = None if what == "none" else f"{what} in shards, copies: {parallel.get('copies')}"
    if size > 1:
        return f"cells of {size} ranks" + (f", {spread}" if spread else "")
    return spread or "state whole on every rank"


def layout_of(run: Evidence) -> str:
    """Describe how a run's state is sharded, if its configuration can be read."""
    return unless_broken(lambda: in_words(parallel_of(run)), "a layout that config.yaml does not say")


def parallel_of(run: Evidence) -> dict[str, object]:
    """Return the `parallel` section of a job's configuration; empty for configurations older than it."""
    return part(run.config, "parallel") if isinstance(run.config.get("parallel"), dict) else {}


def copies_of(run: Evidence) -> int | None:
    """Return the number of copies of each shard; None if every rank holds the whole state."""
    parallel = parallel_of(run)
    return whole(parallel, "copies") if parallel.get("shards", "none") != "none" else None


@once
def losses_of(run: Evidence) -> dict[int, int]:
    """Return the number of lost shards by term, for terms that report any."""
    lost: dict[int, int] = {}
    for line in run.of("restore"):
        if num_lost := line.get("lost"):
            lost.setdefault(whole(line, "term"), int(str(num_lost)))
    return lost


@once
def node_of(run: Evidence) -> dict[object, object]:
    return {pid: line["node"] for line in run.of("node") for pid in line.get("pids") or ()}  # type: ignore[attr-defined]


def holders_gone(run: Evidence, term: int) -> tuple[int, int]:
    """Return how many nodes had lost a member when a term's world formed, and how many losses lose a shard.

    In cells these count ranks of the worst-hit parameter shard: lost ranks, and its ranks, or its copies.

    Members count from the last world that trained: those in it or a later one, and not in the term's. A member without
    a line, which died before its first, counts as a separate node on either side. If all of them left on request, none
    counts: they committed what they alone held. Before the first step there is nothing to commit; the others restart
    from new initial weights.
    """
    pids, nodes, seats = pids_of(run), node_of(run), seats_of(run)
    base = max((other for other in restored_at(run) if other < term), default=0)
    if has_parts(run.config):
        return _holders_of_a_part(run, base, term)
    since = {pid for other, members in pids.items() if base <= other < term for pid in members}
    unknown = sum(seats[other] - len(pids[other]) for other in pids if base <= other < term)
    lost = since - pids[term]
    gone = {nodes.get(pid, ("process", pid)) for pid in (lost if lost - _left(run, base, term) else ())}
    rank_of = {line["rank"]: line["pid"] for line in run.in_term("form", base)}
    holders = [line for line in run.in_term("restore", base) if not line.get("holds_nothing")]
    held_on = {nodes.get(pid := rank_of.get(line["rank"]), ("process", pid)) for line in holders}
    return len(gone) + unknown, min(copies_of(run) or 1, max(1, len(held_on)))


def _holders_of_a_part(run: Evidence, base: int, term: int) -> tuple[int, int]:
    """Return, for the worst-hit parameter shard, how many of its ranks were lost when a term's world formed, and how
    many held it (or each shard of its optimizer state).

    Ranks that held nothing yet when the world broke count as without it. Copies are in different cells where possible,
    so ranks of fewer cells do not make up one.
    """
    size, context = cell_size(run.config), context_size(run.config)
    rank_of = {whole(line, "pid"): whole(line, "rank") for line in run.in_term("form", base)}
    holds = {whole(line, "rank") for line in run.in_term("restore", base)}
    num_holders = seats_of(run).get(base, size) // size * context
    left = {rank for pid in pids_of(run)[term] if (rank := rank_of.get(pid)) in holds}
    needed, num_cells = min(copies_of(run) or num_holders, num_holders), num_holders // context
    is_apart = not any(line.get("holds_nothing") for line in run.in_term("restore", base))
    most = 0
    for first in range(0, size, context):  # the places that hold each shard
        gone = [n for n in range(num_holders) if n // context * size + first + n % context not in left]
        is_enough = len({number // context for number in gone}) >= min(needed, num_cells) or not is_apart
        most = max(most, len(gone) if is_enough else min(len(gone), needed - 1))
    return most, needed


def _left(run: Evidence, base: int, term: int) -> set[object]:
    """Return the processes that left on request after the first step, between two terms."""
    pids = {(line["term"], line["rank"]): line["pid"] for line in run.of("form")}
    leaving = [line for line in run.of("leave") if base <= whole(line, "term") < term and whole(line, "step")]
    return {pids.get((line["term"], line["rank"])) for line in leaving}


def is_told_again(run: Evidence, term: int) -> bool:
    """Return True if the world before had also lost shards and applied no step: then the loss is the same one.

    A rank that was away may still hold a part of the steps discarded there.
    """
    base = max((other for other in restored_at(run) if other < term), default=0)
    return base in losses_of(run) and not list(run.in_term("step", base))


def is_begun_anew(run: Evidence, term: int) -> bool:
    """Return True if a term's world ended because shards were lost before the first commit."""
    if (copies_of(run) is None and not has_parts(run.config)) or term in restored_at(run):
        return False
    formed = min(number(line, "t") for line in run.in_term("form", term))
    if any(number(line, "t") < formed for line in run.of("commit")):
        return False
    gone, needed = holders_gone(run, term)
    return gone >= needed
