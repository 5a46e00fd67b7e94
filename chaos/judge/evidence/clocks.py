"""Put all evidence on one clock: hosts' clocks may differ by seconds, but order is judged from times.

A step ends on all ranks at nearly the same moment, since its reduction does. So the times that two hosts record for
shared steps and worlds differ by their clock difference, unless one was frozen just then. The executor's clock is
matched through its faults, which name the term and step seen by then. Each host's stamps are then shifted.

Clock differences below TOLERANCE_S are ignored: no judged order depends on so little. A host that shared no world with
another is not shifted; separate groups of hosts are shifted separately.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median_low

Line = dict[str, object]
Lines = list[list[Line]]
TOLERANCE_S = 0.5
_STAMPS = ("t", "joined_at", "sealed_at", "started_at", "created_at")
_FORMED = -1
_MOST_STEPS = 2000
"""Most steps compared per pair of hosts: enough for a median."""
_LEAST_STEPS = 8
"""Steps that a process must share with others of its host before its clock may count as different."""


def offsets_of(processes: Sequence[Sequence[Line]]) -> dict[str, float]:
    """Return how far each host's clock is ahead of the executor's; hosts without a difference are omitted."""
    hosts = _hosts(processes)
    if len(set(hosts.values())) < 2:
        return {}
    seen = _formed(processes) | _applied(processes, hosts)
    differences = _differences(seen)
    anchors = [line for process in processes for line in process if line["op"] == "fault" and _is_time(line)]
    found = [_from(host, differences) for host in sorted(set(hosts.values()))]
    best = dict[frozenset[str], dict[str, float]]()  # groups of hosts that met, directly or through others
    for offsets in sorted(found, key=lambda offsets: (_contradictions(seen, offsets, anchors), _sizes(offsets))):
        best.setdefault(frozenset(offsets), offsets)
    return {host: offset for by in best.values() for host, offset in by.items() if abs(offset) > TOLERANCE_S}


def on_one_clock(processes: Lines, offsets: Mapping[str, float]) -> Lines:
    """Return the lines with all stamps moved to the executor's clock."""
    if not offsets:
        return processes
    hosts = _hosts(processes)
    return [[moved(line, offsets.get(str(hosts.get(_place(line))), 0.0)) for line in process] for process in processes]


def leaders(processes: Sequence[Sequence[Line]]) -> dict[object, str]:
    """Return the host of each term's rank 0, which writes commits and metrics."""
    return {term: host for (term, rank), host in _hosts(processes).items() if rank == 0}


def moved(line: Line, offset: float) -> Line:
    """Return a line with its times moved back by `offset` seconds."""
    if offset == 0.0:
        return line
    return {key: _earlier(value, offset) if key in _STAMPS else value for key, value in line.items()}


def _earlier(value: object, offset: float) -> object:
    return value - offset if isinstance(value, int | float) and not isinstance(value, bool) else value


def _place(line: Line) -> tuple[object, object]:
    return line.get("term"), line.get("rank")


def _is_time(line: Line) -> bool:
    return isinstance(line.get("t"), int | float)


def _hosts(processes: Sequence[Sequence[Line]]) -> dict[tuple[object, object], str]:
    """Return the host of each (term, rank); if a process's clock differs from its host's, the process instead.

    Processes of one host share its clock, except in containers or virtual machines with the host's name.
    """
    forms = [line for process in processes for line in process if line["op"] == "form" and "host" in line]
    hosts = {_place(line): str(line["host"]) for line in forms}
    own = {_place(line): f"{line['host']} {line.get('pid')}" for line in forms}
    if len(set(own.values())) == len(set(hosts.values())):
        return hosts
    differences = _differences(_applied(processes, own), _LEAST_STEPS)
    apart = {
        one
        for one, others in differences.items()
        if any(abs(ahead) > TOLERANCE_S for other, ahead in others.items() if _host_of(one) == _host_of(other))
    }
    return {place: own[place] if own[place] in apart else host for place, host in hosts.items()}


def _host_of(process: str) -> str:
    return process.rpartition(" ")[0]


def _applied(
    processes: Sequence[Sequence[Line]], hosts: Mapping[tuple[object, object], str]
) -> dict[tuple[int, int], dict[str, float]]:
    """Return when each host applied each (term, step): the earliest of its ranks."""
    applied: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for process in processes:
        for line in process:
            if line["op"] == "step" and _is_time(line) and (host := hosts.get(_place(line))) is not None:
                at = applied[int(str(line["term"])), int(str(line["step"]))]
                at[host] = min(float(str(line["t"])), at.get(host, float("inf")))
    return applied


def _formed(processes: Sequence[Sequence[Line]]) -> dict[tuple[int, int], dict[str, float]]:
    """Return when each host recorded each world's formation, as step _FORMED of its term, before all others."""
    formed: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for process in processes:
        for line in process:
            if line["op"] == "form" and _is_time(line) and "host" in line:
                at, host = formed[int(str(line["term"])), _FORMED], str(line["host"])
                at[host] = min(float(str(line["t"])), at.get(host, float("inf")))
    return formed


def _differences(
    seen: Mapping[tuple[int, int], Mapping[str, float]], least_steps: int = 1
) -> dict[str, dict[str, float]]:
    """Return, for each host, how far the clocks of the others in its worlds are ahead of its own."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for at in seen.values():
        for one, here in at.items():
            for other, there in at.items():
                if one != other and len(found[one, other]) < _MOST_STEPS:
                    found[one, other].append(here - there)
    ahead: dict[str, dict[str, float]] = defaultdict(dict)
    for one, other in sorted(pair for pair, steps in found.items() if len(steps) >= least_steps):
        ahead[other][one] = median_low(found[one, other])
    return ahead


def _from(host: str, differences: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return how far all clocks are ahead of one host's, via other hosts where they never met."""
    offsets, left = {host: 0.0}, [host]
    while left:
        known = left.pop(0)
        for other, difference in differences.get(known, {}).items():
            if other not in offsets:
                offsets[other] = offsets[known] + difference
                left.append(other)
    return offsets


def _sizes(offsets: Mapping[str, float]) -> float:
    return sum(abs(offset) for offset in offsets.values())


def _contradictions(
    seen_by: Mapping[tuple[int, int], Mapping[str, float]],
    offsets: Mapping[str, float],
    anchors: Sequence[Line],
) -> tuple[float, float]:
    """Return by how many seconds, over all faults, seen steps are later than the fault, or unseen ones earlier.

    The first number counts only what exceeds the executor's delay; the second, counting all, breaks ties.
    """
    at: dict[tuple[int, int], float] = {}
    for place, by in seen_by.items():
        if times := [t - offsets[host] for host, t in by.items() if host in offsets]:
            at[place] = min(times)
    places = sorted(at)
    earliest = list(accumulate((at[place] for place in reversed(places)), min))[::-1]
    wrong_s = list[float]()
    for fault in anchors:
        term, step, moment = fault.get("term"), fault.get("seen_step"), float(str(fault["t"]))
        if not isinstance(term, int) or not isinstance(step, int):
            continue
        if (seen := at.get((term, step))) is not None:
            wrong_s.append(seen - moment)
        if (following := bisect_right(places, (term, step))) < len(places):
            wrong_s.append(moment - earliest[following])
    most_s, all_s = (sum(max(0.0, each_s - least_s) for each_s in wrong_s) for least_s in (TOLERANCE_S / 2, 0.0))
    return most_s, all_s
