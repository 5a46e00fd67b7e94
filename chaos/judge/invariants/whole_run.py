"""Invariants of the whole run: it ended, faults took effect at the expected cost, and it made progress.

They guard the others: without a fault a good verdict would prove nothing, so it is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from chaos.judge.evidence.applied import (
    formed_at,
    is_live,
    lineage_of,
    pids_of,
    reached_by,
    restored_at,
    result_of,
    settled_in,
    shape_of,
    steps_of,
)
from chaos.judge.evidence.copies import is_begun_anew, losses_of
from chaos.judge.evidence.recovery_cost import (
    Recovery,
    after_the_last_step,
    fault_kind,
    fault_name,
    recoveries,
    ridden_out,
    seats_of,
)
from chaos.judge.evidence.run_files import Evidence, Line, number, whole
from chaos.judge.evidence.spells import answering_s, patience_of, spell_end, spells_of
from chaos.judge.findings import Unknown, Violated
from chaos.judge.invariants.rollbacks import check_rollbacks

_KILLS = ("kill_worker", "kill_node")


def finished(run: Evidence) -> str:
    """The job ended and recorded it."""
    result = result_of(run)
    if result["status"] == "running":
        raise Unknown(f"the job has not ended; it is judged up to its commit of step {result['step']}")
    if result["status"] != "done":
        raise Violated(f"the job ended as {result['status']} at step {result['step']}")
    shape = shape_of(run)
    if result["step"] != shape.total_steps or result["num_samples"] != shape.rows:
        said = f"done at step {result['step']} of {result['num_samples']} rows"
        due = f"{shape.total_steps} steps of {shape.rows} rows"
        raise Violated(f"the job says that it is {said}; by its configuration and manifest it is {due}")
    return f"done at step {result['step']}, the last by configuration and manifest, in term {result['term']}"


def faults(run: Evidence) -> str:
    """All faults took effect; each changed the world or was ridden out; a kill at a drawn step put steps at risk."""
    injected = run.of("fault")
    if not is_soak(run) and (missed := run.of("missed")):
        raise Unknown(f"{fault_kind(missed[0])} never came: {missed[0].get('why', 'no process came there')}")
    if not injected:
        raise Unknown("no fault was injected, so recovery was not put to the test")
    proved = {line.get("fault") for line in run.of("effect") if _is_proof(line, injected)}
    if unproved := [fault for fault in injected if "number" in fault and fault["number"] not in proved]:
        raise Unknown(f"{fault_name(unproved[0])}: nothing shows that it had an effect")
    recovered = {recovery.place: recovery for recovery in recoveries(run)}
    spared = ridden_out(run)
    late = after_the_last_step(run)
    for place, fault in enumerate(injected):
        recovery = recovered.get(place)
        if recovery is None and (place in spared or place in late):
            continue
        if recovery is None:
            raise Unknown(f"{fault_name(fault)} changed nothing: no newer world has applied a step after it")
        is_kill = fault["kind"] in _KILLS and fault.get("is_drawn")
        if is_kill and not is_live(run) and recovery.rpo_steps == 0 and not _is_saved(run, fault, recovery):
            raise Unknown(f"{fault_name(fault)} lost no applied step: it was not put to the test that they come back")
    kinds, missed = len({fault_kind(fault) for fault in injected}), run.of("missed")
    summary = f"{len(injected)} faults of {kinds} kinds, {len(formed_at(run))} terms"
    summary += f"; {len(proved)} have shown their effect" if proved else ""
    summary += f", {len(missed)} missed" if missed else ""
    if spared or late:
        ended = f", {len(late)} after the last step" if late else ""
        return f"{summary}: {len(recovered)} followed by a new world's steps, {len(spared)} ridden out{ended}"
    return f"{summary}, each fault followed by a new world's steps"


def _is_saved(run: Evidence, fault: Line, recovery: Recovery) -> bool:
    """Return True if a leaving survivor committed, after the fault, steps that no earlier commit had."""
    saved = [whole(line, "step") for line in run.of("commit") if number(line, "t") <= number(fault, "t")]
    return whole(restored_at(run)[recovery.term], "step") > max(saved, default=0)


def _is_proof(effect: Line, injected: list[Line]) -> bool:
    """Return True if a line states the proof of a fault's effect, for the right kind."""
    proof = effect.get("proof")
    is_said = isinstance(proof, str) and bool(proof.strip())
    kinds = {fault["kind"] for fault in injected if fault.get("number") == effect.get("fault")}
    return is_said and ("kind" not in effect or effect["kind"] in kinds)


def is_soak(run: Evidence) -> bool:
    """Return True if the run's faults were drawn endlessly; many of these miss, as each waits until all is well."""
    return run.has("healed")


def rpo(run: Evidence) -> str:
    """Every applied step beyond the lineage was discarded by a later world: none was silently recomputed."""
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
    """No step applied by a member is discarded while one of its processes lives on in the next world."""
    for pid, step, before, kept, after in _given_up(run):
        applied = f"step {step} was applied in term {before}, of which process {pid} lives on"
        raise Violated(f"{applied}, and term {after} began at {kept}")


def given_up(run: Evidence) -> int:
    """Return the most applied steps discarded by a process that lived on."""
    return max((step - kept for _, step, _, kept, _ in _given_up(run)), default=0)


def _given_up(run: Evidence) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (pid, step and term before, step and term after) where a surviving process discarded applied steps.

    They need not be its own: if a rank applied a step knowing that all others hold its gradient, each of them can. A
    step applied after losing a peer, without knowing that, counts for that rank only. Steps of lost shards go with
    their holders.
    """
    pids, restored = pids_of(run), restored_at(run)
    # A world that broke before agreeing on its state has no restore, and applied nothing. Terms are in the order in
    # which etcd sealed them: a frozen process records its world after a later one has formed without it.
    for before, after in pairwise(sorted(term for term in formed_at(run) if term in restored)):
        between = [term for term in pids if before < term < after]
        if after in losses_of(run) or any(is_begun_anew(run, term) for term in between):
            continue  # `copies` judges that
        for pid in pids[before] & pids[after]:
            step = max(settled_in(run).get(before, 0), reached_by(run).get((before, pid), 0))
            kept = whole(restored[after], "step")
            if step > kept:
                yield pid, step, before, kept, after


def rto(run: Evidence) -> str:
    """Every fault is followed by a next world's first step within its window, or was ridden out.

    The clock stops while later faults are handled, if a run states how long that takes (`recovery_s`): if faults come
    faster than worlds can form, none is late.
    """
    costs, spared = recoveries(run), ridden_out(run)
    for cost in costs:
        late_s = cost.at + cost.rto_s - _due_at(run, cost)
        late_s -= answering_s(run, cost.at, cost.at + cost.rto_s) if late_s > 0 else 0.0
        if late_s > 0:
            what = (
                f"{fault_name(run.of('fault')[cost.place])}: the next world's first step came {cost.rto_s:.1f} s later"
            )
            raise Violated(f"{what}, {late_s:.1f} s after all should have been over")
    num_others = len(spared) + len(after_the_last_step(run))
    if len(costs) + num_others < len(run.of("fault")) or (not costs and not spared):
        raise Unknown(f"{len(costs)} of {len(run.of('fault')) - num_others} faults were recovered from")
    if not costs:
        return f"no new world had to be formed: {len(spared)} faults were ridden out"
    return f"{min(cost.rto_s for cost in costs):.2f} to {max(cost.rto_s for cost in costs):.2f} s to the next step"


def _due_at(run: Evidence, cost: Recovery) -> float:
    """Return when a fault's next world had to have applied its first step.

    A small world's steps are slow, and it admits a returning node only after the step that announces it: at the latest
    the second one after all is well. A smaller world that formed in time has as long for its first step as for any
    other.
    """
    over, came = spell_end(run, run.of("fault")[cost.place]), cost.at + cost.rto_s
    if came <= over:
        return over
    seats = seats_of(run)
    if (formed := formed_at(run)[cost.term]) <= over and seats[cost.term] < max(seats.values()):
        return max(over, formed + patience_of(run))
    applied = (
        min(number(line, "t") for line in lines) for (term, _), lines in steps_of(run).items() if term < cost.term
    )
    boundaries = sorted(t for t in applied if over < t < came)[:2]
    return boundaries[-1] + patience_of(run) if boundaries else over


def liveness(run: Evidence) -> str:
    """Steps continue wherever no fault holds them up; and once all was undone, the full world trained again."""
    for line in run.of("stuck"):
        raise Violated(str(line["why"]))
    times = [number(line, "t") for line in run.of("step")]
    patience_s, spells, longest_s = patience_of(run), spells_of(run), 0.0
    for before, after in pairwise(times):
        longest_s = max(longest_s, after - before)
        if after - before > patience_s and (quiet_s := spells.quiet_s(before, after)) > patience_s:
            raise Violated(
                f"no step was applied for {after - before:.1f} s, {quiet_s:.1f} s of which nothing was wrong"
            )
    if len(times) < 2:
        raise Unknown("no two steps were recorded")
    longest = f"at most {longest_s:.1f} s between two lines of applied steps"
    if not (seconds := sorted(number(line, "seconds") for line in run.of("healed"))):
        return longest
    half = seconds[(len(seconds) - 1) // 2]
    healed = f"{len(seconds)} times whole again after all was undone: p50 {half:.1f} s, at most {seconds[-1]:.1f} s"
    return f"{healed}; {longest}"
