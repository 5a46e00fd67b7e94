"""Put all evidence on one clock: hosts' clocks may differ by seconds, but order is judged from times.

A step ends on all ranks at nearly the same moment, since its reduction does. So the times that two hosts record for
shared steps and worlds differ by their clock difference, unless one was frozen just then. The executor's clock is
matched through its faults, which name the term and step seen by then, and through the ends of nodes. Each host's stamps
are then shifted.

Clock differences below TOLERANCE_S are ignored: no judged order depends on so little. Hosts that shared no world with
others are a group of their own, and groups are shifted separately. If no clock of a group can be the executor's, all of
them are shifted until they agree with it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import median_low
from typing import NamedTuple

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
    differences, best = _differences(seen), dict[frozenset[str], dict[str, float]]()
    for host in sorted(set(hosts.values())):
        group = _from(host, differences)  # hosts that met, directly or through others
        if frozenset(group) not in best:
            best[frozenset(group)] = _matched(
                group, [*_faults(processes, seen, group), *_ends(processes, hosts, group)]
            )
    return {host: offset for by in best.values() for host, offset in by.items() if abs(offset) > TOLERANCE_S}


def on_one_clock(processes: Lines, offsets: Mapping[str, float]) -> Lines:
    """Return the lines with all stamps moved to the executor's clock."""
    if not offsets:
        return processes
    hosts, leads = _hosts(processes), leaders(processes)

    def on_it(line: Line) -> Line:
        shown = moved(line, offsets.get(str(hosts.get(_place(line))), 0.0))
        if "sealed_at" in line and line.get("term") in leads:  # the leader's clock has stamped it
            shown = {**shown, "sealed_at": _earlier(line["sealed_at"], offsets.get(leads[line.get("term")], 0.0))}
        return shown

    return [[on_it(line) for line in process] for process in processes]


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


class _Bound(NamedTuple):
    """A stamp on a group's clock, and the executor's time until which it was made, or since which."""

    t: float
    until: float = math.inf
    since: float = -math.inf

    def wrong_s(self, ahead_s: float) -> float:
        """Return by how many seconds the stamp contradicts a clock that is so far ahead of the executor's."""
        return max(0.0, self.t - ahead_s - self.until, self.since - self.t + ahead_s)


def _matched(group: Mapping[str, float], bounds: Sequence[_Bound]) -> dict[str, float]:
    """Return how far a group's clocks are ahead of the executor's, given how far they are ahead of the group's clock.

    One of them is the executor's, unless all contradict it by more than its delay. Of several the one is chosen from
    which the fewest differ, and that contradicts it least; then the one with the latest stamps, since nodes end soon
    after their work.
    """
    least_s = max((bound.t - bound.until for bound in bounds), default=-math.inf)
    most_s = min((bound.t - bound.since for bound in bounds), default=math.inf)
    ways = [(False, -offset) for offset in group.values()]
    ways += [(True, ahead_s) for ahead_s in (least_s, most_s) if math.isfinite(ahead_s)]

    def cost(way: tuple[bool, float]) -> tuple[float, ...]:
        is_of_none, ahead_s = way
        wrong_s = [bound.wrong_s(ahead_s) for bound in bounds]
        beyond_s = sum(max(0.0, each_s - TOLERANCE_S / 2) for each_s in wrong_s)
        num_apart = sum(abs(offset + ahead_s) > TOLERANCE_S for offset in group.values())
        sum_s = sum(abs(offset + ahead_s) for offset in group.values())
        return beyond_s, is_of_none, num_apart, sum(wrong_s), ahead_s if math.isfinite(least_s) else 0.0, sum_s

    _, ahead_s = min(ways, key=cost)
    return {host: offset + ahead_s for host, offset in group.items()}


def _faults(
    processes: Sequence[Sequence[Line]],
    seen_by: Mapping[tuple[int, int], Mapping[str, float]],
    group: Mapping[str, float],
) -> Iterator[_Bound]:
    """Yield what a group stamped last of all that a fault saw, and first of all that it did not see.

    The step that the executor saw last is of an older term if the newest one has not applied any.
    """
    at = {
        place: min(times)
        for place, by in seen_by.items()
        if (times := [t - group[host] for host, t in by.items() if host in group])
    }
    first_term = dict[int, int]()
    for place in sorted(seen_by):
        first_term.setdefault(place[1], place[0])
    places = sorted(at)
    earliest = list(accumulate((at[place] for place in reversed(places)), min))[::-1]
    for fault in (line for process in processes for line in process if line["op"] == "fault" and _is_time(line)):
        newest, step, moment = fault.get("term"), fault.get("seen_step"), float(str(fault["t"]))
        if not isinstance(newest, int) or not isinstance(step, int):
            continue
        following = bisect_right(places, (newest, step))
        seen = [place for place in places[max(0, following - 1) : following] if place[0] == newest]
        if seen and first_term[seen[0][1]] < newest:
            seen = [(newest, _FORMED)] if (newest, _FORMED) in at else []
        yield from (_Bound(at[place], until=moment) for place in seen)
        if following < len(places):
            yield _Bound(earliest[following], since=moment)


def _ends(
    processes: Sequence[Sequence[Line]], hosts: Mapping[tuple[object, object], str], group: Mapping[str, float]
) -> Iterator[_Bound]:
    """Yield the last step of each of a group's processes whose node ended."""
    lines = [line for process in processes for line in process if _is_time(line)]
    of_rank = {_place(line): line.get("pid") for line in lines if line["op"] == "form"}
    last = dict[object, float]()
    for line in lines:
        if line["op"] == "step" and (host := hosts.get(_place(line), "")) in group:
            pid, t = of_rank.get(_place(line)), float(str(line["t"])) - group[host]
            last[pid] = max(t, last.get(pid, t))
    ended = ended_at(*([line for line in lines if line["op"] == op] for op in ("node", "exit")))
    yield from (_Bound(t, until=ended[pid]) for pid, t in last.items() if pid in ended)


def ended_at(nodes: Sequence[Line], exits: Sequence[Line]) -> dict[object, float]:
    """Return, by process, when its node ended: the first time after it was found there."""
    ends = defaultdict[object, list[float]](list)
    for line in exits:
        ends[line.get("node")].append(float(str(line["t"])))
    found = dict[object, float]()
    for line in nodes:
        pids, after = line.get("pids"), [t for t in ends[line.get("node")] if t >= float(str(line["t"]))]
        if after and isinstance(pids, list):
            found |= dict.fromkeys(pids, min(after))
    return found
