"""Compare the faults that the executor claims with the processes' histories: a killed process writes no more lines.

A fault that did not happen could otherwise explain any other failure in its window.
"""

from __future__ import annotations

from chaos.judge.evidence.recovery_cost import fault_name
from chaos.judge.evidence.run_files import Evidence, Line, items, number, scenario_field, whole
from chaos.judge.findings import Unknown, Violated
from chaos.judge.invariants import whole_run

_ENDS_AT_ONCE = ("kill_worker", "kill_node")
_LATE_S = 5.0
"""Seconds after a kill within which its process may have stamped lines, as clocks differ a little."""


def faults(run: Evidence) -> str:
    """All faults took effect, and the processes' own lines contradict none."""
    check_kills(run)
    check_returns(run)
    return whole_run.faults(run)


def check_kills(run: Evidence) -> None:
    """A killed process was on the node that was hit, had not been killed before, and applies no later step."""
    node_of = {pid: line["node"] for line in run.of("node") for pid in items(line, "pids")}
    last, killed = _last_step_at(run), set[object]()
    for fault in run.of("fault"):
        if fault["kind"] not in _ENDS_AT_ONCE:
            continue
        if fault.get("node") is None or not items(fault, "pids"):
            raise Violated(f"{fault_name(fault)} names no {'node' if fault.get('node') is None else 'process'}")
        if isinstance(target := fault.get("target"), int) and target != fault["node"]:
            raise Violated(f"{fault_name(fault)} was to hit node {target}")
        nodes = items(fault, "nodes") if "nodes" in fault else [fault["node"]]
        if fault["node"] not in nodes:
            raise Violated(f"{fault_name(fault)} hit nodes {nodes}")
        for pid in items(fault, "pids"):
            if pid in node_of and node_of[pid] not in nodes:
                raise Violated(f"{fault_name(fault)} names process {pid}, which ran on node {node_of[pid]}")
            if pid in killed:
                raise Violated(f"{fault_name(fault)} names process {pid}, which another fault had killed before")
            if (late_s := last.get(pid, 0.0) - number(fault, "t")) > _LATE_S:
                raise Violated(f"{fault_name(fault)} names process {pid}, which applied steps for {late_s:.1f} s more")
        killed |= set(items(fault, "pids"))


def check_returns(run: Evidence) -> None:
    """A killed node has processes again only after a fault, or the undoing of one, has started it."""
    kinds = scenario_field(run, "kinds")
    if not isinstance(kinds, list) or "start_node" not in kinds:
        return  # outside such scenarios, nodes may be restarted without a record
    acts = [*run.of("fault"), *run.of("undo")]
    for fault in run.of("fault"):
        if fault["kind"] != "kill_node" or fault.get("for_s") is not None:
            continue
        at, node = number(fault, "t"), fault["node"]
        known = {pid for line in run.of("node") if number(line, "t") <= at for pid in items(line, "pids")}
        back = [number(x, "t") for x in run.of("node") if x["node"] == node and set(items(x, "pids")) - known]
        if (after := [t for t in back if t > at]) and not any(_starts(act, node, at, after[0]) for act in acts):
            raise Unknown(
                f"node {node} came back {after[0] - at:.1f} s after {fault_name(fault)}, and nothing says why"
            )


def _starts(act: Line, node: object, since: float, until: float) -> bool:
    """Return True if a fault or its undoing may have started a node in an interval."""
    return since < number(act, "t") <= until and (act.get("node") in (node, None) or node in (act.get("nodes") or ()))  # type: ignore[operator]


def _last_step_at(run: Evidence) -> dict[object, float]:
    """Return when each process stamped its last step."""
    pids = {(line["term"], line["rank"]): line["pid"] for line in run.of("form")}
    last: dict[object, float] = {}
    for line in run.of("step"):
        pid = pids.get((whole(line, "term"), line["rank"]))
        last[pid] = max(last.get(pid, 0.0), number(line, "t"))
    return last
