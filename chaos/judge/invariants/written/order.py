"""Invariant of time: histories are in chronological order, and fit where two of them meet.

Single times prove nothing, so they are compared: a world is sealed before it forms, a state read before a step is
applied, all ranks have applied a step before any applies the next, a commit follows its step, and the executor's
claimed step had been applied. All times are on one clock by then, to within a second or two; if faults set clocks, only
the order of lines is judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

from chaos.judge.evidence.applied import formed_at, restored_at, steps_of
from chaos.judge.evidence.clocks import ended_at
from chaos.judge.evidence.recovery_cost import fault_name
from chaos.judge.evidence.run_files import Evidence, Line, items, number, whole
from chaos.judge.findings import Violated

_CLOCK_S = 1.0
"""Seconds that a host's clock may go back, or threads may write lines out of order."""
_HOSTS_S = 2.0
"""Seconds: the same between two hosts."""
_EXECUTOR_S = 5.0
"""Seconds until the executor notices, or records, the end of a process."""
_SEEN_S = 60.0
"""Seconds after which the executor has seen every step."""
_SETS_CLOCKS = ("jump_clock", "skew_clocks")
_OPEN = {"unsettled", "pending"}
_ONCE = {"form", "restore", "step", "commit", "validate", "end"}
"""Operations that occur once per process and world, or once per step."""


def order(run: Evidence) -> str:
    """Every history starts with its world and state and is chronological, and the histories fit together."""
    for process in run.processes:
        _check_sequence(process)
    if any(fault["kind"] in _SETS_CLOCKS for fault in run.of("fault")):
        return f"{len(run.processes)} histories are in order; a fault set clocks, so times were not compared"
    is_one_host = len({line.get("host") for line in run.of("form")}) == 1
    for process in run.processes:
        _check_times(process)
        _check_rank(process, is_one_host)
    for term, lines in (run.metrics or {}).items():
        _check_metrics(run, term, lines)
    _check_together(run)
    _check_faults(run)
    return f"{len(run.processes)} histories are in the order of time, and fit"


def _check_sequence(process: list[Line]) -> None:
    """A rank's history starts with `form` and `restore`, and has no step after its end."""
    if not process or "rank" not in process[0]:
        return
    done, once = set[object](), set[object]()
    for line in process:
        if (place := (line["op"], line.get("step"))) in once:
            raise Violated(f"{_named(line)} is there twice")
        once |= {place} if line["op"] in _ONCE else set()
        op, whose = line["op"], f"the history of rank {line.get('rank')} of term {line.get('term')}"
        if not done and op not in ("form", "unformed", "script"):
            raise Violated(f"{whose} begins with `{op}`, not with its world (`form`)")
        if op in ("step", "validate", "commit") and not done & {"restore", "script"}:
            raise Violated(f"{whose} has `{op}` before it has restored a state (`restore`)")
        if op in ("step", "validate", "restore") and "end" in done:
            raise Violated(f"{whose} has `{op}` behind its end")
        done.add(op)


def _check_times(process: list[Line]) -> None:
    latest, slack = process[0] if process else {}, _CLOCK_S if process and "rank" in process[0] else _EXECUTOR_S
    for line in process:
        if line["op"] == "exit":
            continue  # written at the job's end, stamped at the node's
        if number(line, "t") < number(latest, "t") - slack:
            back_s = number(latest, "t") - number(line, "t")
            raise Violated(f"{_named(line)} is stamped {back_s:.1f} s before {_named(latest)}, which comes first")
        latest = line if number(line, "t") > number(latest, "t") else latest


def _check_rank(process: list[Line], is_one_host: bool) -> None:
    """Check one rank's times: joining, restores and commits in a possible order."""
    at = dict[object, float]()
    for line in process:
        op, t = line["op"], number(line, "t")
        if op == "form":
            at["form"] = t
            # Another host's clock may have stamped the seal, or the start.
            for key in ("joined_at", "sealed_at", "started_at")[: 3 if is_one_host else 1]:
                if line.get(key) is not None and (late_s := number(line, key) - t) > _HOSTS_S:
                    raise Violated(f"{_named(line)}: {key} is {late_s:.1f} s after it had formed")
        elif op == "restore":
            at["step", line["step"]] = t
            _check_took(line, number(line, "seconds"), t - at.get("form", t))
        elif op == "step":
            at["step", line["step"]] = t
        elif op == "commit":
            begun = at.get(("step", line["step"]))
            if "seconds" in line and begun is not None:
                _check_took(line, number(line, "seconds"), t - begun)
            if "stall_s" in line and "seconds" in line:
                _check_took(line, number(line, "stall_s"), number(line, "seconds"))
            made = number({"created_at": t, **line}, "created_at")
            if not (begun or made) - _CLOCK_S <= made <= t + _CLOCK_S:
                raise Violated(f"{_named(line)}: created_at {made:.1f} is not between its step and its publication")


def _check_took(line: Line, seconds: float, most_s: float) -> None:
    if not 0 <= seconds <= most_s + _CLOCK_S:
        raise Violated(f"{_named(line)} says that it took {seconds:.1f} s, it was over after {most_s:.1f} s")


def _check_metrics(run: Evidence, term: int, lines: list[Line]) -> None:
    """A term's file states its start, is chronological, and logs no step before it is applied."""
    applied = {whole(line, "step"): number(line, "t") for line in reversed(run.in_term("step", term))}
    restore = restored_at(run).get(term)
    for place, line in enumerate(lines):
        where = f"metrics/{term:08d}.jsonl, line {place + 1}"
        if line.get("term") != term:
            raise Violated(f"{where} is of term {line.get('term')}")
        if place == 0 and "begins_at" not in line:
            raise Violated(f"{where} does not say where the term begins (`begins_at`)")
        if "begins_at" in line and restore is not None and line["begins_at"] != restore["step"]:
            raise Violated(f"{where} begins at step {line['begins_at']}, its world restored step {restore['step']}")
        if "values" in line and number(line, "t") < applied.get(whole(line, "step"), 0.0) - _HOSTS_S:
            early_s = applied[whole(line, "step")] - number(line, "t")
            raise Violated(f"{where} logs step {line['step']} {early_s:.1f} s before it was applied")
    _check_times([{"op": "values", "rank": 0, "term": term, **line} for line in lines])


def _check_together(run: Evidence) -> None:
    """All ranks of a world have applied a step before any applies the next or enters the next world."""
    latest, earliest = dict[tuple[int, int], Line](), dict[tuple[int, int], Line]()
    for place, lines in steps_of(run).items():
        settled = [line for line in lines if not _OPEN & line.keys()]
        if settled:
            latest[place] = max(settled, key=lambda line: number(line, "t"))
            earliest[place] = min(settled, key=lambda line: number(line, "t"))
    for (term, step), line in latest.items():
        after = earliest.get((term, step + 1))
        if after is not None and (late_s := number(line, "t") - number(after, "t")) > _HOSTS_S:
            raise Violated(f"{_named(line)} comes {late_s:.1f} s after {_named(after)}, for which it was needed")
    rank_of = {(line["term"], line["rank"]): line["pid"] for line in run.of("form")}
    left = dict[object, Line]()
    for line in sorted([*run.of("form"), *run.of("step")], key=lambda x: (whole(x, "term"), x["op"] == "step")):
        pid = rank_of.get((line["term"], line["rank"]))
        before = left.get(pid)
        if before is not None and line["op"] == "form" and number(before, "t") > number(line, "t") + _CLOCK_S:
            raise Violated(f"process {pid} stamps {_named(before)} after {_named(line)}, of a later term")
        if before is None or number(line, "t") > number(before, "t") or line["op"] == "form":
            left[pid] = line


def _check_faults(run: Evidence) -> None:
    """Faults follow the steps that they claim were seen, effects follow faults, and nodes end after their work."""
    faults = {fault["number"]: fault for fault in run.of("fault") if "number" in fault}
    if len(faults) < sum("number" in fault for fault in run.of("fault")):
        raise Violated("two faults have one number")
    for effect in run.of("effect"):
        fault = faults.get(effect.get("fault"))
        if fault is not None and number(effect, "t") < number(fault, "t") - _EXECUTOR_S:
            raise Violated(f"{fault_name(fault)} had its effect before it came")
    for fault in faults.values():
        _check_seen(run, fault)
    for line in run.of("healed"):
        began = [number(each, "t") for each in run.of("scenario")]
        _check_took(line, number(line, "seconds"), number(line, "t") - min(began, default=0.0))
    _check_exits(run)


def _check_seen(run: Evidence, fault: Line) -> None:
    term, seen, at = fault.get("term"), fault.get("seen_step"), number(fault, "t")
    due = fault.get("at_step")
    if isinstance(due, int) and isinstance(seen, int) and due > seen:
        raise Violated(f"{fault_name(fault)} was due at step {due}")
    if not isinstance(seen, int):
        return
    newest = max((one for one, t in formed_at(run).items() if t <= at), default=None)
    term = term if isinstance(term, int) else newest
    for line in run.in_term("step", term) if term is not None else ():
        step, t = whole(line, "step"), number(line, "t")
        if step == seen and t > at + _HOSTS_S and not _applied_before(run, step, at):
            raise Violated(f"{fault_name(fault)} came {t - at:.1f} s before that step was applied")
        if step > seen and t < at - _SEEN_S:
            raise Violated(f"{fault_name(fault)} came {at - t:.1f} s after step {step} of its term")


def _applied_before(run: Evidence, step: int, at: float) -> bool:
    """Return True if some term had applied or restored a step by then."""
    lines = chain(run.of("step"), run.of("restore"))
    return any(line["step"] == step and number(line, "t") <= at + _HOSTS_S for line in lines)


def _check_exits(run: Evidence) -> None:
    over = max((number(line, "t") for line in run.of("clean")), default=math.inf)
    if late := [line["node"] for line in run.of("exit") if number(line, "t") > over + _EXECUTOR_S]:
        raise Violated(f"node {late[0]} ended (`exit`) after all nodes had ended (`clean`)")
    last, node_of = dict(_last_steps(run)), {pid: x["node"] for x in run.of("node") for pid in items(x, "pids")}
    for pid, t in ended_at(run.of("node"), run.of("exit")).items():
        if (late_s := last.get(pid, 0.0) - t) > _EXECUTOR_S:
            where = f"a process of node {node_of[pid]}"
            raise Violated(f"{where} applied a step {late_s:.1f} s after the node had ended (`exit`)")
    ends = {line["node"]: number(line, "t") for line in run.of("exit")}
    for line in run.of("node"):
        since, t = ends.get(line["node"], math.inf), number(line, "t")
        if t > since + _EXECUTOR_S and not any(since <= number(act, "t") <= t for act in run.of("undo")):
            raise Violated(f"node {line['node']} has processes {t - since:.1f} s after its end (`exit`), and no start")


def _last_steps(run: Evidence) -> Iterator[tuple[object, float]]:
    """Yield every process with the time of each of its steps, in order of time."""
    pids = {(line["term"], line["rank"]): line["pid"] for line in run.of("form")}
    for line in run.of("step"):
        yield pids.get((line["term"], line["rank"])), number(line, "t")


def _named(line: Line) -> str:
    place = ", ".join(f"{name} {line[name]}" for name in ("term", "rank", "step", "node", "number") if name in line)
    return f"`{line['op']}` ({place})" if place else f"`{line['op']}`"
