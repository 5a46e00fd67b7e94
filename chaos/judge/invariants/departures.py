"""Invariant of departures: a fault explains each one from a world, and each world of the same processes again.

A fault explains what happens in its spell (`chaos.judge.evidence.spells`). What it may explain there is written
at each check.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise, takewhile
from typing import Any

from chaos.judge.evidence.applied import formed_at, is_live, pids_of
from chaos.judge.evidence.copies import is_begun_anew
from chaos.judge.evidence.recovery_cost import last_seen, sealed_at, seats_of
from chaos.judge.evidence.run_files import (
    Evidence,
    Line,
    items,
    number,
    scenario_field,
    whole,
)
from chaos.judge.evidence.spells import spells_of
from chaos.judge.findings import Unknown, Violated
from chaos.judge.job_shape import cell_size, stage_size
from chaos.scenario.kinds import (
    affects_all,
    asks_all_to_leave,
    cuts_off,
    is_of_etcd,
    is_over_at_once,
    parts,
)

_ENDS_NODES = ("kill_node", "stop_node", "kill_job")
_ENDS_ALL_WORKERS = ("block_ports",)
_TELL_TO_LEAVE = ("stop_node", "flap_node", "scale_down", "preempt_node")
_TURNED_AWAY = {
    "private_storage": 2,
    "other_limits": 2,
    "other_code": 2,
    "unfit_node": 71,
    "twin_dir": 2,
    "readonly_dir": 2,
    "bad_row_group": 65,
}
"""With which code a node ends by itself while something is wrong with it that it cannot mend."""
MOST_WORLDS_LEAVING = 3
"""How many worlds of the same processes a process that was asked to leave may explain: it leaves with the next step of
which all have the sum, or, if it is too late for that, in the next world."""


def deaths(run: Evidence) -> str:
    """Every new term, every process without an end, and every node that failed has a fault that explains it."""
    terms = sorted(formed_at(run))
    if is_live(run):
        _check_changes(run)
    else:
        _check_worlds(run)
    ended = {(line["term"], line["rank"]) for line in run.of("end")}
    lost = [line for line in run.of("form") if line["term"] == terms[-1] and (line["term"], line["rank"]) not in ended]
    if lost and (run.result or {}).get("status") not in ("running", "stuck"):
        who = f"process {lost[0]['pid']}, rank {lost[0]['rank']} of the last term"
        raise Unknown(f"{who}, died, and no fault explains it")
    for line in run.of("exit"):
        if whole(line, "code") != 0 and not _is_explained(run, line):
            raise Unknown(f"node {line['node']} ended with code {line['code']}, and no fault explains it")
    return f"{len(terms) - 1} changes of the world, each explained by a fault"


def _check_worlds(run: Evidence) -> None:
    """No process outlives a world of the `restart` mode: it ends because a fault hit it, or because a node came.

    A fault hits a world if it came, lasted or was undone after that was sealed, or had hit one of its processes before;
    and the world has to end in the fault's spell. An agent that was kept from etcd is a member of the next world, too:
    a renewal that was lost is missed later, and ends one world. Where all had finished, an agent that hears late of it
    may start its workers again, which find the job done.
    """
    formed, pids, seats, sealed = formed_at(run), pids_of(run), seats_of(run), sealed_at(run)
    node_of = {pid: line["node"] for line in run.of("node") for pid in _pids(line)}
    spent, applied = set[tuple[int, object]](), {line["term"] for line in run.of("step")}
    for before, after, hits in _changes(run):
        until = max((_until(line) for line in hits), default=0.0)
        hit = {pid for line in hits for pid in _pids(line)}
        began = sealed.get(before, formed[before])
        if _had_finished(run, before) and after not in applied:
            continue
        if until >= began or not hit.isdisjoint(pids[before]) or seats[after] > seats[before]:
            continue
        own = {node_of[pid] for pid in pids[before] if pid in node_of}
        cut_off = {
            (id(line), node) for line in hits if cuts_off(line["kind"]) for node in own.intersection(_nodes(line))
        }
        if cut_off <= spent:
            raise Unknown(f"term {after} was formed, but no fault since term {before} explains it")
        spent |= cut_off


def _tells_to_leave(hit: Line) -> bool:
    return hit["kind"] in _TELL_TO_LEAVE or asks_all_to_leave(hit["kind"])


def _had_finished(run: Evidence, term: int) -> bool:
    """Say whether every process of a term's world has recorded that the job is done."""
    done = {line["rank"] for line in run.of("end") if line["term"] == term and line["status"] == "done"}
    return len(done) == seats_of(run)[term]


def _check_changes(run: Evidence) -> None:
    """Processes leave a live world only when a fault hit them, and worlds end only because one left or came.

    A process that was hit, or started and ended by the undoing of a fault, may leave in the fault's spell, or once come
    back as another member; nodes are in a world as a whole, so the rest of a node leaves with it. With each
    stage of a cell that is lost as many others may wait as its cell has. Of two nodes that do not reach each other,
    either may leave, or take the other's place. A process that was asked to leave ends a few
    worlds until it has left; one that was hit before it had recorded any world may have been in one that no history
    has, or have been waited for, and ends one. A fault of etcd or of the storage hits all members of a world while it
    lasts, as does a twin, whose nodes may take their places; of etcd, each may lose its lease after it, and one after
    the other.
    """
    formed, pids, seats, sealed = formed_at(run), pids_of(run), seats_of(run), sealed_at(run)
    seen_in, recorded = last_seen(run), {pid for members in pids.values() for pid in members}
    node_of = {pid: line["node"] for line in run.of("node") for pid in _pids(line)}
    lost = {line["term"] for line in run.of("form") if line.get("cause") == "lost"}  # one of the members before is gone
    worlds_left, spent = dict[tuple[int, object], int](), set[tuple[int, object]]()
    for before, after, hits in _changes(run):
        began = sealed.get(before, formed[before])
        until = max((_until(line) for line in hits), default=0.0)
        all_until = max((_until(line) for line in hits if affects_all(line["kind"])), default=0.0)
        struck = {(id(line), pid) for line in hits for pid in _pids(line)}
        hit = {pid for _, pid in struck}
        broken = {node_of[pid] for pid in hit if pid in node_of}
        excused = {pid for pid in pids[before] if began <= all_until or pid in hit or node_of.get(pid) in broken}
        if _is_parted(hits, {node_of.get(pid) for pid in pids[before] | pids[after]}):
            excused |= pids[before]
        excused |= _hit_unrecorded(run, after)
        if is_begun_anew(run, before):
            excused |= pids[before]
        # A world may break before all have recorded it, or before any has.
        gone = sorted(pid for pid in pids[before] - pids[after] - excused if seen_in[pid] == before)
        most_idle = len((pids[before] & excused) - pids[after]) * (cell_size(run.config) - stage_size(run.config))
        if len(gone) > most_idle:
            raise Unknown(f"process {gone[0]} left between terms {before} and {after}, and no fault explains it")
        if pids[before] != pids[after] or seats[before] != seats[after] or until >= began:
            continue
        leaving = {(id(line), pid) for line in hits if _tells_to_leave(line) for pid in _pids(line)}
        late = [one for one in leaving if one[1] in pids[before] and worlds_left.get(one, MOST_WORLDS_LEAVING) > 0]
        left = struck - spent
        again = {one for one in left if one[1] not in recorded}
        if after in lost and (members := {one for one in left if one[1] in pids[before]}):
            of_etcd = [(id(line), pid) for line in hits if is_of_etcd(line["kind"]) for pid in _pids(line)]
            again = {*[one for one in of_etcd if one in members][:1]} or members
        if not late and not again:
            raise Unknown(f"term {after} was formed by the processes of term {before}, and no fault explains it")
        worlds_left.update({one: worlds_left.get(one, MOST_WORLDS_LEAVING) - 1 for one in late})
        spent |= set() if late else again


def unfit(run: Evidence) -> str:
    """A machine that computes wrongly is let into no world, and is named, for as long as it does."""
    times = _unfit_times(run)
    for fault, until in times:
        if let_in := _let_in(run, fault, until):
            raise Violated(f"process {let_in[0]} of node {fault['node']}, which computes wrongly, was let into a world")
    num_named = sum(_is_named(run, fault, until) for fault, until in times)
    if not num_named:
        raise Unknown("no machine that computes wrongly was named")
    return f"{num_named} times a machine that computes wrongly was named, and let into no world"


def is_any_unfit(run: Evidence) -> bool:
    """Say whether there is anything to judge: a node may be ended again before it has examined its machine."""
    try:
        has_left = any(line["code"] == _TURNED_AWAY["unfit_node"] for line in run.of("exit"))
        return has_left or run.has("unfit") or any(_let_in(run, *times) for times in _unfit_times(run))
    except (KeyError, TypeError, ValueError):
        return False  # evidence that lacks so much is unknown to all other invariants


def _unfit_times(run: Evidence) -> list[tuple[Line, float]]:
    """Return each fault of a machine that computes wrongly, and when that was over."""
    undone = [line for line in run.of("undo") if line["kind"] == "unfit_node"]
    return [(fault, _over_at(fault, undone)) for fault in run.of("fault") if fault["kind"] == "unfit_node"]


def _over_at(fault: Line, undone: list[Line]) -> float:
    own = (number(line, "t") for line in undone if line.get("node", fault["node"]) == fault["node"])
    return min((at for at in own if at > number(fault, "t")), default=math.inf)


def _let_in(run: Evidence, fault: Line, until: float) -> list[Any]:
    """Return the processes that a fault's node has started meanwhile and that were in a world."""
    return sorted(_started(run, fault, until) & {line["pid"] for line in run.of("form")} - {*_pids(fault)})


def _is_named(run: Evidence, fault: Line, until: float) -> bool:
    """Say whether a process that the node has started says what is wrong, or some process does meanwhile.

    The executor need not know of one that was in no world, and the node's clock may be wrong.
    """
    own = _started(run, fault, until)
    return any(line["pid"] in own or number(fault, "t") < number(line, "t") < until for line in run.of("unfit"))


def _started(run: Evidence, fault: Line, until: float) -> set[Any]:
    since = number(fault, "t")
    began = [line for line in run.of("node") if line["node"] in _nodes(fault) and since < number(line, "t") < until]
    return {pid for line in began for pid in _pids(line)}


def _is_parted(hits: list[Line], nodes: set[object]) -> bool:
    """Say whether two worlds were of two nodes in all, which had been kept from each other."""
    return len(nodes) == 2 and any(parts(line["kind"]) and not nodes.isdisjoint(_nodes(line)) for line in hits)


def _hit_unrecorded(run: Evidence, term: int) -> set[Any]:
    """Return the processes that were hit when they may have been members of a term that did not live to record it.

    Such a member may have been in the next worlds, too, as far as each of them has a seat without a record.
    """
    formed, pids, seats = formed_at(run), pids_of(run), seats_of(run)
    terms = takewhile(lambda other: seats[other] > len(pids[other]), sorted(t for t in formed if t >= term))
    return {pid for other in terms for pid in _hit_in(run, other)}


def _hit_in(run: Evidence, term: int) -> set[Any]:
    """Return the processes that were hit from when a term's world had formed until the next one had."""
    formed = formed_at(run)
    until = min((t for other, t in formed.items() if other > term), default=math.inf)
    return {pid for hit in run.of("fault") if formed[term] < number(hit, "t") <= until for pid in _pids(hit)}


def _changes(run: Evidence) -> Iterator[tuple[int, int, list[Line]]]:
    """Yield each term, the next one, and the faults and undoings in whose spells that formed.

    (When it was sealed is known by its leader's clock, which may be wrong.)
    """
    spells, formed = spells_of(run), formed_at(run)
    for before, after in pairwise(sorted(formed)):
        yield before, after, spells.at(formed[after])


def _pids(line: Line) -> list[object]:
    return items(line, "pids")


def _until(line: Line) -> float:
    """Return when a fault is over; its undoing, and what ends processes, is so at once."""
    seconds = line.get("for_s")
    is_short = is_over_at_once(line["kind"]) or not isinstance(seconds, int | float)
    return number(line, "t") + (0.0 if is_short else number(line, "for_s"))


def _is_explained(run: Evidence, exit_: Line) -> bool:
    """Say whether the last thing done to a node was to end it, or its agent gave up.

    It does so where it was kept from etcd, or etcd was away, not long before; and when workers have failed more
    often than it may start its own again: in a live job its own, however many of them a fault ends at once, else
    anybody's (the first to report a failure pays).
    """
    at, most = number(exit_, "t"), scenario_field(run, "max_restarts")
    for hit in spells_of(run).at(at):
        mine = _TURNED_AWAY if exit_["node"] in _nodes(hit) else {}
        if exit_["code"] == mine.get(str(hit["kind"])):
            return True
    done = [fault["kind"] for fault in run.of("fault") if exit_["node"] in _nodes(fault) and number(fault, "t") <= at]
    if done and done[-1] in _ENDS_NODES:
        return True
    hits = spells_of(run).at(at)
    if any(is_of_etcd(hit["kind"]) or (cuts_off(hit["kind"]) and exit_["node"] in _nodes(hit)) for hit in hits):
        return True
    num_hits = len(_hits_on(run, exit_["node"], at) if is_live(run) else run.of("fault"))
    return isinstance(most, int) and num_hits > most


def _hits_on(run: Evidence, node: object, until: float) -> list[Line]:
    """Return the faults that came to a node; one may name another, and have ended all nodes' workers."""
    own = {pid for line in run.of("node") if line["node"] == node for pid in _pids(line)}
    came = [fault for fault in run.of("fault") if number(fault, "t") <= until]
    return [
        fault
        for fault in came
        if node in _nodes(fault) or (fault["kind"] in _ENDS_ALL_WORKERS and not own.isdisjoint(_pids(fault)))
    ]


def _nodes(fault: Line) -> list[object]:
    return items(fault, "nodes") if fault.get("nodes") else [fault.get("node")]
