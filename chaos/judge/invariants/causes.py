"""Invariant of `status --why`: which processes it blames for the end of a world, and its advice."""

from __future__ import annotations

from chaos.judge.evidence.applied import result_of
from chaos.judge.evidence.recovery_cost import fault_name
from chaos.judge.evidence.run_files import Evidence, Line, items, number, whole
from chaos.judge.findings import Violated
from chaos.scenario.kinds import ADVICE, advised


def is_put_to_the_test(run: Evidence) -> bool:
    return run.has("why")


def causes(run: Evidence) -> str:
    """`status --why` blames only processes that faults ended, and its advice fits the fault's kind."""
    faults, num_named = {fault.get("number"): fault for fault in run.of("fault")}, 0
    answers = run.of("why")
    for line in answers:
        do, said = str(line["do"]), f"`status --why` says: {line['sentence']}"
        if ADVICE.get(do) != line["exit_code"]:
            raise Violated(f"`status --why` advises '{do}' and ends with {line['exit_code']}")
        if "fault" not in line:
            expected = "nothing" if result_of(run)["status"] == "done" else do
            if do != expected or line["of_rank"] is not None:
                raise Violated(f"at the end there is {expected} to do, and {said}")
            continue
        fault = faults.get(line["fault"])
        if fault is None or advised(fault["kind"]) is None:
            raise Violated(f"no fault {line['fault']} ends processes, and {said}")
        num_named += line["of_rank"] is not None
        _check(run, fault, line, said)
    asked = sum("fault" in line for line in answers)
    return f"asked {len(answers)} times, {asked} of them after a fault: it named the right process {num_named} times"


def _check(run: Evidence, fault: Line, line: Line, said: str) -> None:
    """Check one answer: a process that left no message is not blamed, and the advice is to restart the job."""
    expected = {advised(fault["kind"])}
    if line["of_rank"] is not None:
        if (by := _struck_by(run, fault, whole(line, "of_rank"))) is None:
            raise Violated(f"{fault_name(fault)} hit no process of rank {line['of_rank']}, and {said}")
        expected = {advised(by["kind"]) or "fix"}  # an error where the kind need not end a process: it may recur
    else:
        expected.add("start")
    if line["do"] not in expected:
        asked = " or ".join(sorted(map(str, expected)))
        raise Violated(f"{fault_name(fault)} asks for '{asked}', not for '{line['do']}': {said}")


def _struck_by(run: Evidence, fault: Line, rank: int) -> Line | None:
    """Return the fault, or else an earlier one, that hit a process of a rank since the last world that trained.

    If the fault's own process left no message, that of an earlier one is the cause that is known.
    """
    at = number(fault, "t")
    worlds = [form for form in run.of("form") if number(form, "t") <= at]
    newest = max((whole(form, "term") for form in worlds), default=0)
    since = max((whole(step, "term") for step in run.of("step") if number(step, "t") <= at), default=newest)
    struck = [one for one in run.of("fault") if number(one, "t") <= at and whole(one, "term") >= since]
    for one, terms in ((fault, {newest}), *((one, {*range(since, newest + 1)}) for one in reversed(struck))):
        pids = {form["pid"] for form in worlds if form["rank"] == rank and form["term"] in terms}
        if pids & set(items(one, "pids")):
            return one
    return None
