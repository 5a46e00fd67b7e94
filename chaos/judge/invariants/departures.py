"""Invariant of departures: a fault explains each one from a world, and each world of the same processes again.

A fault explains what happens in its window (`chaos.judge.evidence.fault_windows`). What it may explain there is written
at each check.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise

from chaos.judge.evidence.applied import formed_at, is_live, pids_of
from chaos.judge.evidence.fault_windows import fault_windows_of, over_at, patience_of
from chaos.judge.evidence.recovery_cost import last_seen, sealed_at, seats_of
from chaos.judge.evidence.run_files import (
    Evidence,
    Line,
    items,
    number,
    scenario_field,
)
from chaos.judge.findings import Unknown
from chaos.scenario.kinds import (
    befalls_all,
    cuts_off,
    is_of_etcd,
    is_over_at_once,
)

_ENDS_NODES = ("kill_node", "stop_node", "kill_job")
_TELL_TO_LEAVE = ("stop_node", "flap_node", "scale_down")
_TURNED_AWAY = {"private_storage": 2}
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
        if line["code"] != 0 and not _is_explained(run, line):
            raise Unknown(f"node {line['node']} ended with code {line['code']}, and no fault explains it")
    return f"{len(terms) - 1} changes of the world, each explained by a fault"


def _check_worlds(run: Evidence) -> None:
    """No process outlives a world of the `restart` mode: it ends because a fault hit it, or because a node came.

    A fault hits a world if it came, lasted or was undone after that was sealed, or had hit one of its processes before;
    and the world has to end in the fault's window. An agent that was kept from etcd is a member of the next world, too:
    a renewal that was lost is missed later, and ends one world.
    """
    formed, pids, seats, sealed = formed_at(run), pids_of(run), seats_of(run), sealed_at(run)
    node_of = {pid: line["node"] for line in run.of("node") for pid in _pids(line)}
    window, until, hit, cut_off = 0.0, 0.0, set[object](), set[object]()
    for before, after, hits, since in _changes(run):
        if since != window:
            window, until, hit, cut_off = since, 0.0, set(), set()
        until = max(until, *(_until(line) for line in hits), 0.0)
        hit.update(pid for line in hits for pid in _pids(line))
        cut_off.update(node for line in hits if cuts_off(line["kind"]) for node in _nodes(line))
        began = sealed.get(before, formed[before])
        if until >= began or not hit.isdisjoint(pids[before]) or seats[after] > seats[before]:
            continue
        members = cut_off & {node_of[pid] for pid in pids[before] if pid in node_of}
        if not members:
            raise Unknown(f"term {after} was formed, but no fault since term {before} explains it")
        cut_off -= members


def _check_changes(run: Evidence) -> None:
    """Processes leave a live world only when a fault hit them, and worlds end only because one left or came.

    A process that was hit, or started and ended by the undoing of a fault, may leave in the fault's window, or once
    come back as another member; nodes are in a world as a whole, so the rest of a node leaves with it. A process that
    was asked to leave ends a few worlds until it has left; one that was hit before it had recorded any world may have
    been in one that no history has, or have been waited for, and ends one. A fault of etcd or of the storage hits all
    members of a world while it lasts.
    """
    formed, pids, seats, sealed = formed_at(run), pids_of(run), seats_of(run), sealed_at(run)
    seen_in = last_seen(run)  # a world may break before all have recorded it
    node_of = {pid: line["node"] for line in run.of("node") for pid in _pids(line)}
    lost = {line["term"] for line in run.of("form") if line.get("cause") == "lost"}  # one of the members before is gone
    last_hit = {pid: number(line, "t") for line in _by_time([*run.of("fault"), *run.of("undo")]) for pid in _pids(line)}
    window, until, all_until, leaving_for, struck = 0.0, 0.0, 0.0, dict[object, int](), set[object]()
    for before, after, hits, since in _changes(run):
        if since != window:
            window, until, all_until, leaving_for, struck = since, 0.0, 0.0, {}, set()
        began = sealed.get(before, formed[before])
        until = max(until, *(_until(line) for line in hits), 0.0)
        all_until = max(all_until, *(_until(line) for line in hits if befalls_all(line["kind"])), 0.0)
        struck.update(pid for line in hits for pid in _pids(line))
        leaving = (pid for line in hits if line["kind"] in _TELL_TO_LEAVE for pid in _pids(line))
        leaving_for.update(dict.fromkeys(leaving, MOST_WORLDS_LEAVING))
        hit = {pid for pid, at in last_hit.items() if at >= since}
        broken = {node_of[pid] for pid in hit if pid in node_of}
        excused = {pid for pid in pids[before] if began <= all_until or pid in hit or node_of.get(pid) in broken}
        gone = sorted(pid for pid in pids[before] - pids[after] - excused if seen_in[pid] == before)
        if gone:
            raise Unknown(f"process {gone[0]} left between terms {before} and {after}, and no fault explains it")
        if pids[before] != pids[after] or seats[before] != seats[after] or until >= began:
            continue
        late = [pid for pid in pids[before] if leaving_for.get(pid, 0) > 0]
        again = pids[before] if after in lost and not struck.isdisjoint(pids[before]) else struck - seen_in.keys()
        if not late and not again:
            raise Unknown(f"term {after} was formed by the processes of term {before}, and no fault explains it")
        leaving_for.update({pid: leaving_for[pid] - 1 for pid in late})
        struck -= set() if late else again


def _changes(run: Evidence) -> Iterator[tuple[int, int, list[Line], float]]:
    """Yield each term, the next one, the faults and undoings between them, and since when what was done may explain it.

    That is the beginning of the window in which the next world formed, or that moment itself if it is in none. (When
    it was sealed is known by its leader's clock, which may be wrong.) Every fault is yielded once, if it is of that
    window.
    """
    hits, windows, formed = _by_time([*run.of("fault"), *run.of("undo")]), fault_windows_of(run), formed_at(run)
    times, place = [number(line, "t") for line in hits], 0
    for before, after in pairwise(sorted(formed)):
        end = max(place, bisect_right(times, formed[after]))
        since = windows.since(formed[after])
        yield before, after, [line for line in hits[place:end] if number(line, "t") >= since], since
        place = end


def _by_time(lines: list[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: number(line, "t"))


def _pids(line: Line) -> list[object]:
    return items(line, "pids")


def _until(line: Line) -> float:
    """Return when a fault is over; its undoing, and what ends processes, is so at once."""
    seconds = line.get("for_s")
    is_short = is_over_at_once(line["kind"]) or not isinstance(seconds, int | float)
    return number(line, "t") + (0.0 if is_short else number(line, "for_s"))


def _is_explained(run: Evidence, exit_: Line) -> bool:
    """Say whether the last thing done to a node was to end it, or its agent gave up.

    It does so where it was once kept from etcd, or etcd was away not long before; and when workers have failed more
    often than it may start its own again (the first to report a failure pays for it).
    """
    hits = [fault for fault in run.of("fault") if exit_["node"] in _nodes(fault)]
    if any(_TURNED_AWAY.get(str(hit["kind"])) == exit_["code"] and _lasts(run, hit, exit_) for hit in hits):
        return True
    mine = [hit["kind"] for hit in hits]
    if mine and (mine[-1] in _ENDS_NODES or any(cuts_off(kind) for kind in mine)):
        return True
    most, since = scenario_field(run, "max_restarts"), fault_windows_of(run).since(number(exit_, "t"))
    is_worn_out = isinstance(most, int) and not is_live(run) and len(run.of("fault")) > most
    return is_worn_out or any(is_of_etcd(fault["kind"]) and number(fault, "t") >= since for fault in run.of("fault"))


def _lasts(run: Evidence, fault: Line, exit_: Line) -> bool:
    """Say whether a fault was there, or just over, when a node ended."""
    return number(fault, "t") <= number(exit_, "t") <= over_at(fault) + patience_of(run)


def _nodes(fault: Line) -> list[object]:
    return items(fault, "nodes") if fault.get("nodes") else [fault.get("node")]
