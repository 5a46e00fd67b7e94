"""Invariants of the run as a whole: it ended, faults were really injected and cost what they should, nothing is left.

These are the checks that keep the others honest: without a fault, or with a death that no fault explains, a good
verdict would prove nothing, so it is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from chaos.applied import formed_at, lineage_of, pids_of, reached_by, restored_at, result_of, steps_of
from chaos.evidence import Evidence, Line, items, number, whole
from chaos.findings import Unknown, Violated
from chaos.recovery import fault_name, recoveries

_KILLS = ("kill_worker", "kill_node")
_ENDS_NODES = ("kill_node", "stop_node")


def finished(run: Evidence) -> str:
    """The job came to its end and said so."""
    result = result_of(run)
    if result["status"] != "done":
        raise Violated(f"the job ended as {result['status']} at step {result['step']}")
    return f"done at step {result['step']} in term {result['term']}"


def faults(run: Evidence) -> str:
    """Faults were injected, every one changed the world, and a kill at a drawn step made applied steps be lost."""
    injected = run.of("fault")
    if not injected:
        raise Unknown("no fault was injected, so recovery was not put to the test")
    recovered = {recovery.at: recovery for recovery in recoveries(run)}
    for fault in injected:
        recovery = recovered.get(number(fault, "t"))
        if recovery is None:
            raise Unknown(f"{fault_name(fault)} changed nothing: no newer world has applied a step after it")
        if not is_live(run) and fault["kind"] in _KILLS and fault.get("is_drawn") and recovery.rpo_steps == 0:
            raise Unknown(f"{fault_name(fault)} lost no applied step: it was not put to the test that they come back")
    return f"{len(injected)} faults, {len(formed_at(run))} terms, each fault followed by a new world's steps"


def deaths(run: Evidence) -> str:
    """Every new term, every process without an end, and every node that failed has a fault that explains it."""
    injected, formed = run.of("fault"), formed_at(run)
    terms = list(formed)
    for before, after in pairwise(terms):
        if is_live(run):
            _check_change(run, before, after)
        elif not any(formed[before] <= number(fault, "t") <= formed[after] for fault in injected):
            raise Unknown(f"term {after} was formed, but no fault since term {before} explains it")
    ended = {(line["term"], line["rank"]) for line in run.of("end")}
    lost = [line for line in run.of("form") if line["term"] == terms[-1] and (line["term"], line["rank"]) not in ended]
    if lost:
        who = f"process {lost[0]['pid']}, rank {lost[0]['rank']} of the last term"
        raise Unknown(f"{who}, died, and no fault explains it")
    for line in run.of("exit"):
        if line["code"] != 0 and not _is_explained(line, injected):
            raise Unknown(f"node {line['node']} ended with code {line['code']}, and no fault explains it")
    return f"{len(terms) - 1} changes of the world, each explained by a fault"


def is_live(run: Evidence) -> bool:
    """Say whether survivors kept their processes over the changes of the world."""
    return any(line.get("recovery") == "live" for line in run.of("scenario"))


def _check_change(run: Evidence, before: int, after: int) -> None:
    """Processes leave a live world only when a fault hit them, and worlds end only because one left or came."""
    formed, pids = formed_at(run), pids_of(run)
    injected = [fault for fault in run.of("fault") if number(fault, "t") <= formed[after]]
    hit = {pid for fault in injected for pid in items(fault, "pids")}
    gone = sorted(pids[before] - pids[after] - hit)
    if gone:
        raise Unknown(f"process {gone[0]} left between terms {before} and {after}, and no fault explains it")
    if pids[before] == pids[after] and not any(number(fault, "t") >= formed[before] for fault in injected):
        raise Unknown(f"term {after} was formed by the processes of term {before}, and no fault explains it")


def _is_explained(exit_: Line, injected: list[Line]) -> bool:
    """Say whether the last thing done to a node was to end it."""
    kinds = [fault["kind"] for fault in injected if fault["node"] == exit_["node"]]
    return bool(kinds) and kinds[-1] in _ENDS_NODES


def rpo(run: Evidence) -> str:
    """Every applied step beyond the lineage is one that a later world gave up: none was computed again unseen."""
    costs = recoveries(run)
    if not costs:
        raise Unknown("nothing was recovered from")
    if is_live(run):
        check_kept(run)
    last = max(restored_at(run))
    beyond = set(steps_of(run)) - {(applied.term, applied.step) for applied in lineage_of(run)}
    for term, step in sorted(beyond):
        if term >= last:
            raise Violated(f"step {step} of term {term} is not in the lineage, and no later world gave it up")
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
    """Every fault is followed by a next world's first applied step; returns how long that took."""
    costs = recoveries(run)
    if len(costs) < len(run.of("fault")) or not costs:
        raise Unknown(f"{len(costs)} of {len(run.of('fault'))} faults were recovered from")
    return f"{min(cost.rto_s for cost in costs):.2f} to {max(cost.rto_s for cost in costs):.2f} s to the next step"


def cleanliness(run: Evidence) -> str:
    """No process of the job outlived it."""
    ends = run.of("clean")
    if not ends:
        raise Unknown("nobody looked for processes that outlived the job")
    orphans = items(ends[-1], "orphans")
    if orphans:
        raise Violated(f"processes {orphans} outlived the job")
    return "no process outlived the job"
