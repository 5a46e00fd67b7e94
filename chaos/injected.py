"""Invariants of the run as a whole: it ended, faults were really injected and cost what they should, nothing is left.

These are the checks that keep the others honest: without a fault, or with a death that no fault explains, a good
verdict would prove nothing, so it is unknown.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise

from chaos.applied import formed_at, lineage_of, pids_of, reached_by, restored_at, result_of, steps_of
from chaos.evidence import Evidence, Line, items, number, told, whole
from chaos.findings import Unknown, Violated
from chaos.kinds import befalls_all, cuts_off, is_over_at_once
from chaos.recovery import behind_the_last_step, fault_kind, fault_name, recoveries, ridden_out, sealed_at, seats_of
from chaos.rollbacks import check_rollbacks
from chaos.spells import Spells, patience_of, spells_of

_KILLS = ("kill_worker", "kill_node")
_ENDS_NODES = ("kill_node", "stop_node", "kill_job")
_TELL_TO_LEAVE = ("stop_node", "flap_node", "scale_down")
MOST_WORLDS_LEAVING = 3
"""Worlds of the same processes that one who was told to leave may explain: it leaves with the next step that all have
the sum of, or is too late for that and does so in the next world."""


def finished(run: Evidence) -> str:
    """The job came to its end and said so."""
    result = result_of(run)
    if result["status"] == "running":
        raise Unknown(f"the job has not ended; it is judged up to its commit of step {result['step']}")
    if result["status"] != "done":
        raise Violated(f"the job ended as {result['status']} at step {result['step']}")
    return f"done at step {result['step']} in term {result['term']}"


def faults(run: Evidence) -> str:
    """Faults were injected, each changed the world or was ridden out, and a kill at a drawn step lost applied steps."""
    injected = run.of("fault")
    if not injected:
        raise Unknown("no fault was injected, so recovery was not put to the test")
    recovered = {recovery.place: recovery for recovery in recoveries(run)}
    spared = ridden_out(run)
    late = behind_the_last_step(run)
    for place, fault in enumerate(injected):
        recovery = recovered.get(place)
        if recovery is None and (place in spared or place in late):
            continue
        if recovery is None:
            raise Unknown(f"{fault_name(fault)} changed nothing: no newer world has applied a step after it")
        if not is_live(run) and fault["kind"] in _KILLS and fault.get("is_drawn") and recovery.rpo_steps == 0:
            raise Unknown(f"{fault_name(fault)} lost no applied step: it was not put to the test that they come back")
    kinds = len({fault_kind(fault) for fault in injected})
    told = f"{len(injected)} faults of {kinds} kinds, {len(formed_at(run))} terms"
    if spared or late:
        ended = f", {len(late)} behind the last step" if late else ""
        return f"{told}: {len(recovered)} followed by a new world's steps, {len(spared)} ridden out{ended}"
    return f"{told}, each fault followed by a new world's steps"


def deaths(run: Evidence) -> str:
    """Every new term, every process without an end, and every node that failed has a fault that explains it."""
    injected, formed = run.of("fault"), formed_at(run)
    terms = list(formed)
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
        if line["code"] != 0 and not _is_explained(line, injected):
            raise Unknown(f"node {line['node']} ended with code {line['code']}, and no fault explains it")
    return f"{len(terms) - 1} changes of the world, each explained by a fault"


def is_live(run: Evidence) -> bool:
    """Say whether survivors kept their processes over the changes of the world."""
    return told(run, "recovery") == "live"


def _check_worlds(run: Evidence) -> None:
    """No process outlives a world of the `restart` mode: it ends because a fault hit it, or because somebody came.

    A fault hits a world if it came, lasted or was undone after that was sealed, or had hit one of its processes before;
    and the world has to end in the fault's spell.
    """
    formed, pids, seats, sealed = formed_at(run), pids_of(run), seats_of(run), sealed_at(run)
    spell, until, hit = 0.0, 0.0, set[object]()
    for before, after, hits, since in _changes(run):
        if since != spell:
            spell, until, hit = since, 0.0, set()
        until = max(until, *(_until(line) for line in hits), 0.0)
        hit.update(pid for line in hits for pid in _pids(line))
        began = sealed.get(before, formed[before])
        is_hit = until >= began or not hit.isdisjoint(pids[before])
        if not is_hit and seats[after] <= seats[before]:
            raise Unknown(f"term {after} was formed, but no fault since term {before} explains it")


def _check_changes(run: Evidence) -> None:
    """Processes leave a live world only when a fault hit them, and worlds end only because one left or came.

    Who was hit, or started and ended by the undoing of a fault, may leave in the fault's spell, or once come back as
    another member; who was told to leave ends a few worlds until it has left. A fault of etcd or of the storage hits
    all who are in a world while it lasts.
    """
    formed, pids, seats, sealed = formed_at(run), pids_of(run), seats_of(run), sealed_at(run)
    last_seen = {pid: term for term in formed for pid in pids[term]}  # a world may break before all have told of it
    lost = {line["term"] for line in run.of("form") if line.get("cause") == "lost"}  # one of the members before is gone
    last_hit = {pid: number(line, "t") for line in _by_time([*run.of("fault"), *run.of("undo")]) for pid in _pids(line)}
    spell, until, all_until, told, struck = 0.0, 0.0, 0.0, dict[object, int](), set[object]()
    for before, after, hits, since in _changes(run):
        if since != spell:
            spell, until, all_until, told, struck = since, 0.0, 0.0, {}, set()
        began = sealed.get(before, formed[before])
        until = max(until, *(_until(line) for line in hits), 0.0)
        all_until = max(all_until, *(_until(line) for line in hits if befalls_all(line["kind"])), 0.0)
        struck.update(pid for line in hits for pid in _pids(line))
        leaving = (pid for line in hits if line["kind"] in _TELL_TO_LEAVE for pid in _pids(line))
        told.update(dict.fromkeys(leaving, MOST_WORLDS_LEAVING))
        excused = (
            pids[before] if began <= all_until else {pid for pid in pids[before] if last_hit.get(pid, 0.0) >= since}
        )
        gone = sorted(pid for pid in pids[before] - pids[after] - excused if last_seen[pid] == before)
        if gone:
            raise Unknown(f"process {gone[0]} left between terms {before} and {after}, and no fault explains it")
        if pids[before] != pids[after] or seats[before] != seats[after] or until >= began:
            continue
        late = [pid for pid in pids[before] if told.get(pid, 0) > 0]
        if not late and (after not in lost or struck.isdisjoint(pids[before])):
            raise Unknown(f"term {after} was formed by the processes of term {before}, and no fault explains it")
        told.update({pid: told[pid] - 1 for pid in late})
        struck -= set() if late else pids[before]


def _changes(run: Evidence) -> Iterator[tuple[int, int, list[Line], float]]:
    """Yield each term, the next one, the faults and undoings between them, and since when what was done may explain it.

    That is the beginning of the spell in which the next world was sealed, or that moment itself if it is in none. Every
    fault is yielded once, if it is of that spell.
    """
    hits, spells = _by_time([*run.of("fault"), *run.of("undo")]), spells_of(run)
    times, place = [number(line, "t") for line in hits], 0
    formed, sealed = formed_at(run), sealed_at(run)
    for before, after in pairwise(formed):
        end = max(place, bisect_right(times, formed[after]))
        since = spells.since(max(sealed.get(after, formed[after]), times[end - 1] if end > place else 0.0))
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


def _is_explained(exit_: Line, injected: list[Line]) -> bool:
    """Say whether the last thing done to a node was to end it, or it was once kept from etcd, and its agent gave up."""
    kinds = [fault["kind"] for fault in injected if exit_["node"] in _nodes(fault)]
    return bool(kinds) and (kinds[-1] in _ENDS_NODES or any(cuts_off(kind) for kind in kinds))


def _nodes(fault: Line) -> list[object]:
    return items(fault, "nodes") if fault.get("nodes") else [fault.get("node")]


def rpo(run: Evidence) -> str:
    """Every applied step beyond the lineage is one that a later world gave up: none was computed again unseen."""
    costs, spared = recoveries(run), ridden_out(run)
    if not costs and not spared:
        raise Unknown("nothing was recovered from")
    if is_live(run):
        check_kept(run)
    check_rollbacks(run)
    last = max(restored_at(run))
    beyond = set(steps_of(run)) - {(applied.term, applied.step) for applied in lineage_of(run)}
    for term, step in sorted(beyond):
        if term >= last:
            raise Violated(f"step {step} of term {term} is not in the lineage, and no later world gave it up")
    if not costs:
        return f"{len(beyond)} applied steps computed again; {len(spared)} faults were ridden out"
    return f"{len(beyond)} applied steps computed again, at most {max(cost.rpo_steps for cost in costs)} a fault"


def check_kept(run: Evidence) -> None:
    """No process that lives on in the next world gave up a step that it had applied."""
    for pid, step, before, kept, after in _given_up(run):
        raise Violated(f"process {pid} had applied step {step} in term {before}, term {after} began at {kept}")


def given_up(run: Evidence) -> int:
    """Return the most applied steps that a process which lives on in the next world gave up."""
    return max((step - kept for _, step, _, kept, _ in _given_up(run)), default=0)


def _given_up(run: Evidence) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield process, step and term before, step and term after, where a process gave up applied steps."""
    pids, restored = pids_of(run), restored_at(run)
    # A world that broke before its state was agreed on has no restore, and applied nothing.
    for before, after in pairwise(term for term in formed_at(run) if term in restored):
        for pid in pids[before] & pids[after]:
            step, kept = reached_by(run).get((before, pid), 0), whole(restored[after], "step")
            if step > kept:
                yield pid, step, before, kept, after


def rto(run: Evidence) -> str:
    """Every fault is followed by a next world's first applied step in its spell, or was ridden out; tells how long."""
    costs, spared, spells = recoveries(run), ridden_out(run), spells_of(run)
    for cost in costs:
        late_s = cost.at + cost.rto_s - spells.until(cost.at)
        if late_s > 0:
            what = (
                f"{fault_name(run.of('fault')[cost.place])}: the next world's first step came {cost.rto_s:.1f} s later"
            )
            raise Violated(f"{what}, {late_s:.1f} s after all should have been over")
    num_others = len(spared) + len(behind_the_last_step(run))
    if len(costs) + num_others < len(run.of("fault")) or (not costs and not spared):
        raise Unknown(f"{len(costs)} of {len(run.of('fault')) - num_others} faults were recovered from")
    if not costs:
        return f"no world had to be formed anew: {len(spared)} faults were ridden out"
    return f"{min(cost.rto_s for cost in costs):.2f} to {max(cost.rto_s for cost in costs):.2f} s to the next step"


def liveness(run: Evidence) -> str:
    """Steps go on wherever no fault holds them up; and where all was undone, the whole world trained again."""
    for line in run.of("stuck"):
        raise Violated(str(line["why"]))
    times = [number(line, "t") for line in run.of("step")]
    patience_s, spells, longest_s = patience_of(run), spells_of(run), 0.0
    for before, after in pairwise(times):
        longest_s = max(longest_s, after - before)
        if after - before > patience_s and (quiet_s := _longest_quiet_s(spells, before, after)) > patience_s:
            raise Violated(
                f"no step was applied for {after - before:.1f} s, {quiet_s:.1f} s of which nothing was wrong"
            )
    if len(times) < 2:
        raise Unknown("no two steps were recorded")
    told = f"at most {longest_s:.1f} s between two lines of applied steps"
    if not (seconds := sorted(number(line, "seconds") for line in run.of("healed"))):
        return told
    half = seconds[(len(seconds) - 1) // 2]
    return (
        f"{len(seconds)} times whole again after all was undone: p50 {half:.1f} s, at most {seconds[-1]:.1f} s; {told}"
    )


def _longest_quiet_s(spells: Spells, since: float, until: float) -> float:
    """Return the longest part of an interval that is in no spell."""
    quiet_s, at = 0.0, since
    for begin, end in zip(spells.begins, spells.ends, strict=True):
        if begin < until and end > at:
            quiet_s, at = max(quiet_s, begin - at), end
    return max(quiet_s, until - at)
