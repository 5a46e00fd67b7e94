"""Invariant of departures: a fault explains every departure from a world, and every new world of the same processes.

A fault explains events in its window (`chaos.judge.evidence.spells`); each check says which.
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
from chaos.scenario.kinds import affects_all, asks_all_to_leave, is_over_at_once, kind_of

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
"""Exit code of a node that ends by itself because of a problem that it cannot fix."""
MOST_WORLDS_LEAVING = 3
"""Worlds of the same processes that a leaving process may explain: it leaves with the next step whose sum all have, or,
if too late for that, in the next world."""


def deaths(run: Evidence) -> str:
    """A fault explains every new term, every process without an end, and every failed node."""
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
    """No process outlives a world of `restart` mode: a fault hit it, or a node joined.

    A fault hits a world if it came, lasted or was undone after sealing, or had hit one of its processes before; the
    world must end in its window. An agent that was cut off from etcd, or has bad data, is also a member of the next
    world: it misses a lost renewal, or reads the data, later, and ends one world. Where all had finished, an agent that
    hears of it late may restart its workers, which then find the job done.
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
            (id(line), node)
            for line in hits
            if kind_of(line["kind"]).cuts_off or line["kind"] == "bad_row_group"
            for node in own.intersection(_nodes(line))
        }
        if cut_off <= spent:
            raise Unknown(f"term {after} was formed, but no fault since term {before} explains it")
        spent |= cut_off


def _tells_to_leave(hit: Line) -> bool:
    return hit["kind"] in _TELL_TO_LEAVE or asks_all_to_leave(hit["kind"])


def _had_finished(run: Evidence, term: int) -> bool:
    """Return True if every process of a term's world has recorded that the job is done."""
    done = {line["rank"] for line in run.of("end") if line["term"] == term and line["status"] == "done"}
    return len(done) == seats_of(run)[term]


def _check_changes(run: Evidence) -> None:
    """Processes leave a live world only if a fault hit them, and worlds end only because a process left or joined.

    A process that was hit, or that an undoing started and ended, may leave in the fault's window, or return once as a
    new member; nodes join worlds as a whole, so the rest of a node leaves with it. A lost stage may idle as many ranks
    as its cell has. Of two nodes that cannot reach each other, either may leave or replace the other. A leaving process
    ends a few worlds; one that was hit before it recorded any world may have been in an unrecorded one, or have been
    waited for, and ends one. A fault of etcd or storage hits all members while it lasts, as does a twin, whose nodes
    may replace them; after an etcd fault each member may lose its lease, one after the other.
    """
    formed, pids, seats, sealed = formed_at(run), pids_of(run), seats_of(run), sealed_at(run)
    seen_in, recorded = last_seen(run), {pid for members in pids.values() for pid in members}
    node_of = {pid: line["node"] for line in run.of("node") for pid in _pids(line)}
    lost = {line["term"] for line in run.of("form") if line.get("cause") == "lost"}  # a former member is gone
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
        # A world may break before all members, or any, have recorded it.
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
            of_etcd = [(id(line), pid) for line in hits if kind_of(line["kind"]).aim == "etcd" for pid in _pids(line)]
            again = {*[one for one in of_etcd if one in members][:1]} or members
        if not late and not again:
            raise Unknown(f"term {after} was formed by the processes of term {before}, and no fault explains it")
        worlds_left.update({one: worlds_left.get(one, MOST_WORLDS_LEAVING) - 1 for one in late})
        spent |= set() if late else again


def unfit(run: Evidence) -> str:
    """A machine that computes wrongly joins no world while it does, and is named."""
    times = _unfit_times(run)
    for fault, until in times:
        if let_in := _let_in(run, fault, until):
            raise Violated(f"process {let_in[0]} of node {fault['node']}, which computes wrongly, was let into a world")
    num_named = sum(_is_named(run, fault, until) for fault, until in times)
    if not num_named:
        raise Unknown("no machine that computes wrongly was named")
    return f"{num_named} times a machine that computes wrongly was named, and let into no world"


def is_any_unfit(run: Evidence) -> bool:
    """Return True if this can be judged: a node may end before it has examined its machine."""
    try:
        has_left = any(line["code"] == _TURNED_AWAY["unfit_node"] for line in run.of("exit"))
        return has_left or run.has("unfit") or any(_let_in(run, *times) for times in _unfit_times(run))
    except (KeyError, TypeError, ValueError):
        return False  # all other invariants find such evidence unknown


def _unfit_times(run: Evidence) -> list[tuple[Line, float]]:
    """Return each fault of a machine that computes wrongly, and its end."""
    undone = [line for line in run.of("undo") if line["kind"] == "unfit_node"]
    return [(fault, _over_at(fault, undone)) for fault in run.of("fault") if fault["kind"] == "unfit_node"]


def _over_at(fault: Line, undone: list[Line]) -> float:
    own = (number(line, "t") for line in undone if line.get("node", fault["node"]) == fault["node"])
    return min((at for at in own if at > number(fault, "t")), default=math.inf)


def _let_in(run: Evidence, fault: Line, until: float) -> list[Any]:
    """Return the processes that the fault's node started meanwhile and that joined a world."""
    return sorted(_started(run, fault, until) & {line["pid"] for line in run.of("form")} - {*_pids(fault)})


def _is_named(run: Evidence, fault: Line, until: float) -> bool:
    """Return True if a process of the node, or any process during the fault, reports the problem.

    The executor may not know a process that joined no world, and the node's clock may be wrong.
    """
    own = _started(run, fault, until)
    return any(line["pid"] in own or number(fault, "t") < number(line, "t") < until for line in run.of("unfit"))


def _started(run: Evidence, fault: Line, until: float) -> set[Any]:
    since = number(fault, "t")
    began = [line for line in run.of("node") if line["node"] in _nodes(fault) and since < number(line, "t") < until]
    return {pid for line in began for pid in _pids(line)}


def _is_parted(hits: list[Line], nodes: set[object]) -> bool:
    """Return True if two worlds consist of two nodes in total, which were cut off from each other."""
    return len(nodes) == 2 and any(kind_of(line["kind"]).parts and not nodes.isdisjoint(_nodes(line)) for line in hits)


def _hit_unrecorded(run: Evidence, term: int) -> set[Any]:
    """Return the processes that were hit while they may have been members of a term that broke before they recorded it.

    Such a member may be in the next worlds too, while these have members without a record.
    """
    formed, pids, seats = formed_at(run), pids_of(run), seats_of(run)
    terms = takewhile(lambda other: seats[other] > len(pids[other]), sorted(t for t in formed if t >= term))
    return {pid for other in terms for pid in _hit_in(run, other)}


def _hit_in(run: Evidence, term: int) -> set[Any]:
    """Return the processes hit between the formation of a term's world and of the next."""
    formed = formed_at(run)
    until = min((t for other, t in formed.items() if other > term), default=math.inf)
    return {pid for hit in run.of("fault") if formed[term] < number(hit, "t") <= until for pid in _pids(hit)}


def _changes(run: Evidence) -> Iterator[tuple[int, int, list[Line]]]:
    """Yield each term, the next one, and the faults and undoings in whose windows that one formed.

    (The time of sealing is by the leader's clock, which may be wrong.)
    """
    spells, formed = spells_of(run), formed_at(run)
    for before, after in pairwise(sorted(formed)):
        yield before, after, spells.at(formed[after])


def _pids(line: Line) -> list[object]:
    return items(line, "pids")


def _until(line: Line) -> float:
    """Return when a fault is over; undoings and kills are over at once."""
    seconds = line.get("for_s")
    is_short = is_over_at_once(line["kind"]) or not isinstance(seconds, int | float)
    return number(line, "t") + (0.0 if is_short else number(line, "for_s"))


def _is_explained(run: Evidence, exit_: Line) -> bool:
    """Return True if the last act on a node was to end it, or its agent gave up.

    An agent gives up if etcd was recently unreachable or down, or when its restart budget is used up: in a live job by
    failures of its own workers, counted once if one fault ends several; otherwise by anybody's (the first to report a
    failure pays).
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
    if any(
        kind_of(hit["kind"]).aim == "etcd" or (kind_of(hit["kind"]).cuts_off and exit_["node"] in _nodes(hit))
        for hit in hits
    ):
        return True
    num_hits = len(_hits_on(run, exit_["node"], at) if is_live(run) else run.of("fault"))
    return isinstance(most, int) and num_hits > most


def _hits_on(run: Evidence, node: object, until: float) -> list[Line]:
    """Return the faults that affected a node, including those that name another but ended all nodes' workers."""
    own = {pid for line in run.of("node") if line["node"] == node for pid in _pids(line)}
    came = [fault for fault in run.of("fault") if number(fault, "t") <= until]
    return [
        fault
        for fault in came
        if node in _nodes(fault) or (fault["kind"] in _ENDS_ALL_WORKERS and not own.isdisjoint(_pids(fault)))
    ]


def _nodes(fault: Line) -> list[object]:
    return items(fault, "nodes") if fault.get("nodes") else [fault.get("node")]
