"""Invariants of a user's script: what can be observed from outside, and from its hook's log.

Faults, deaths, RPO, RTO and cleanliness are judged as for our own runs; commits, lanes and hashes are not, as a script
logs none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from chaos.judge.evidence.applied import (
    formed_at,
    newest_steps,
    restored_at,
    steps_of,
)
from chaos.judge.evidence.run_files import (
    Evidence,
    Line,
    number,
    whole,
)
from chaos.judge.evidence.script_samples import (
    Tally,
    counts_of,
    kept_steps,
    logs_ids,
    tallies_of,
    unreported,
    where_applied,
)
from chaos.judge.findings import (
    Finding,
    Unknown,
    Violated,
    find,
)
from chaos.judge.invariants import departures, leftovers, whole_run
from chaos.scenario.kinds import ends_world


def finished(run: Evidence) -> str:
    """The job ended: an agent exited with code 0."""
    codes = {line["node"]: line["code"] for line in run.of("exit")}
    if 0 not in codes.values():
        ended = ", ".join(f"node {node} with code {code}" for node, code in codes.items()) or "no agent by itself"
        raise Violated(f"no agent ended well: {ended}")
    return f"agents ended with codes {', '.join(str(code) for code in codes.values())}"


def faults(run: Evidence) -> str:
    """All faults were injected, and each was followed by a new world: by its steps, if the script logs them."""
    for line in [*run.of("stuck"), *run.of("unseen")]:
        raise Unknown(str(line["why"]).partition("\n")[0])
    if not run.of("fault"):
        raise Unknown("no fault was injected, so recovery was not put to the test")
    return whole_run.faults(run) if logs_ids(run) else restarts(run)


def restarts(run: Evidence) -> str:
    """Every fault that ends a world was followed by new processes; return how long that took."""
    seconds = restarted_in(run)
    if not run.of("fault"):
        raise Unknown("no fault was injected")
    missing = [fault for fault in _ending(run) if number(fault, "t") not in seconds]
    if missing:
        raise Unknown(f"no process was started after {missing[0]['kind']} on node {missing[0]['node']}")
    if not seconds:
        return f"no new world had to be started: {len(run.of('fault'))} faults may be ridden out"
    return f"{min(seconds.values()):.2f} to {max(seconds.values()):.2f} s until the next world's processes ran"


def restarted_in(run: Evidence) -> dict[float, float]:
    """Return, by the time of each world-ending fault, the seconds until all processes of the next world ran."""
    started: dict[int, float] = {}
    for line in run.of("form"):
        term = whole(line, "term")
        started[term] = max(number(line, "started_at"), started.get(term, 0.0))
    formed, seconds = formed_at(run), {}
    for fault in _ending(run):
        at = number(fault, "t")
        following = [term for term, t in formed.items() if t > at]
        if following:
            seconds[at] = started[min(following)] - at
    return seconds


def _ending(run: Evidence) -> list[Line]:
    """Return the faults that always end a world; others may be ridden out without a restart."""
    return [fault for fault in run.of("fault") if ends_world(fault["kind"])]


def agreement(run: Evidence) -> str:
    """All ranks of a world go through the same steps of the same epochs, and skip none."""
    kept_steps(run)
    steps = steps_of(run)
    begun = {term: whole(line, "step") for term, line in restored_at(run).items()}
    for (term, step), lines in steps.items():
        epochs = {line["epoch"] for line in lines}
        if len(epochs) > 1:
            raise Violated(f"step {step} of term {term} is of the epochs {sorted(str(epoch) for epoch in epochs)}")
        ranks = [line["rank"] for line in lines]
        if len(ranks) != len(set(ranks)):
            raise Violated(f"step {step} of term {term} was logged twice by a rank")
    for term, newest in newest_steps(steps).items():
        missing = next((step for step in range(begun[term] + 1, newest) if (term, step) not in steps), None)
        if missing is not None:
            raise Violated(f"term {term} applied step {newest}, but not step {missing}")
    return f"{len(steps)} steps of {len(begun)} worlds, all ranks agree on each"


def coverage(run: Evidence, reference: Evidence | None) -> str:
    """Every row of every epoch was applied exactly once by the lineage, and the epochs are those without faults."""
    counts, expected = counts_of(run), _expected(reference)
    last, tallies = max(counts), tallies_of(run)
    # Report differences caused by faults before those that occur without them.
    for epoch in sorted(counts, key=lambda epoch: (tallies[epoch] == expected.get(epoch), epoch)):
        times = counts[epoch]
        # A job that ends inside an epoch without faults may do so with them, but not earlier.
        most_skipped = expected[epoch].num_skipped if epoch == last and epoch in expected else 0
        is_cut_short = tallies[epoch].num_skipped <= most_skipped
        wrong = np.flatnonzero(times > 1 if is_cut_short else times != 1)
        if wrong.size and (times[wrong] > 1).any():
            row = int(wrong[times[wrong] > 1][0])
            often = f"epoch {epoch}: row {row} was applied {int(times[row])} times, in {where_applied(run, epoch, row)}"
            raise Violated(f"{often}; {_in_all(run, expected)}")
        if wrong.size and (reason := unreported(run)) is not None:
            raise Unknown(reason)
        if wrong.size:
            raise Violated(f"epoch {epoch}: row {int(wrong[0])} was never applied; {_in_all(run, expected)}")
    _check_epochs(run, expected)
    rows = {len(times) for times in counts.values()}
    return f"{len(counts)} epochs of {' or '.join(str(size) for size in sorted(rows))} rows, each row exactly once"


def _check_epochs(run: Evidence, expected: dict[int, Tally]) -> None:
    """The epochs are those of the run without faults; if that is not known, none is left out between two."""
    counts = counts_of(run)
    due = sorted(expected) or range(min(counts), max(counts))
    if (lost := next((epoch for epoch in due if epoch not in counts), None)) is not None:
        if (reason := unreported(run)) is not None:
            raise Unknown(reason)
        raise Violated(f"epoch {lost} was never applied")
    if expected and (more := sorted(counts.keys() - expected.keys())):
        raise Violated(f"epoch {more[0]} was applied, and without faults it was not")


def _expected(reference: Evidence | None) -> dict[int, Tally]:
    """Return the tallies of the run without faults; empty if it logs nothing, or has not finished."""
    if reference is None or (reference.result or {}).get("status") != "done":
        return {}
    try:
        return tallies_of(reference)
    except (Unknown, Violated):
        return {}


def _in_all(run: Evidence, expected: dict[int, Tally]) -> str:
    tallies = tallies_of(run).values()
    own = Tally(0, sum(tally.num_repeated for tally in tallies), sum(tally.num_skipped for tally in tallies))
    if not expected:
        return f"in all {own}"
    plain = expected.values()
    without = Tally(0, sum(tally.num_repeated for tally in plain), sum(tally.num_skipped for tally in plain))
    return f"in all {own}; without faults {without}"


def rpo(run: Evidence) -> str:
    """Every applied step beyond the lineage was discarded by a later world."""
    kept_steps(run)
    return whole_run.rpo(run)


def rto(run: Evidence) -> str:
    """Every fault is followed by a next world's first applied step; return how long that took."""
    if not logs_ids(run):
        raise Unknown("the script logs no steps; three lines make it: see chaos.hook")
    return whole_run.rto(run)


def deaths(run: Evidence) -> str:
    """A fault explains every new world that trained, every process without an end, and every failed node."""
    return departures.deaths(_without_idle(run) if logs_ids(run) else run)


def _without_idle(run: Evidence) -> Evidence:
    """Drop worlds that applied nothing: torchrun may try more than once after a fault."""
    trained = {term for term, _ in steps_of(run)} | {max(formed_at(run))}
    processes = [
        [line for line in process if line["op"] != "form" or line["term"] in trained] for process in run.processes
    ]
    return Evidence(run.folder, processes, run.commits, run.config, run.result, run.witness)


INVARIANTS: dict[str, Callable[[Evidence], str]] = {
    "finished": finished,
    "faults": faults,
    "deaths": deaths,
    "restarts": restarts,
    "agreement": agreement,
    "rpo": rpo,
    "rto": rto,
    "cleanliness": leftovers.cleanliness,
}


def judge(run: Evidence, reference: Evidence | None) -> list[Finding]:
    """Return every invariant's finding on a script's run."""
    findings = [find(name, partial(check, run)) for name, check in INVARIANTS.items()]
    return [*findings, find("coverage", partial(coverage, run, reference))]
