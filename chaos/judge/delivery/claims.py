"""Invariant of the result: it agrees with the last commit's record and the configuration.

A record is sealed and its digest is in the histories, so a number forged in result.json alone is detected here; one
forged in both is detected where it is recomputed: sums, weights, validation, skipped steps.
"""

from __future__ import annotations

import math

from chaos.judge.evidence.applied import (
    is_empty,
    is_finite,
    is_stopped_early,
    lineage_of,
    result_of,
    shape_of,
    skipped_steps,
)
from chaos.judge.evidence.recovery_cost import fault_name, seats_of
from chaos.judge.evidence.run_files import Commit, Evidence, Line, items, number, part, scenario_field, whole
from chaos.judge.findings import Unknown, Violated
from chaos.judge.invariants import whole_run
from chaos.judge.invariants.exactly_once.agreement import differ
from chaos.judge.invariants.written.recomputed import check_improvement
from chaos.judge.job_shape import MixedShape

_FIELDS = ("step", "coverage", "weights_sha256", "format", "metrics", "improvement")
_RANGES = ("fast_steps", "skipped_steps")
_ACCOUNT = {"num_left_out": "left_out", "num_truncated": "truncated", "holes": "holes"}
_BOTH = ("ended_by", "epochs", "fast_steps", "num_left_out", "num_truncated", "skipped_steps", "improvement")


def claims(run: Evidence, reference: Evidence | None) -> str:
    """Every field of result.json equals the last commit's, or follows from configuration and histories."""
    result = result_of(run)
    if result.get("status") != "done":
        raise Unknown("the job has not finished: its result claims nothing yet")
    record = last_record(run)
    if record is None or record.fields is None:
        raise Unknown("there is no commit of the last step to compare the result with")
    for name, told in _told_by(record.fields).items():
        if name not in result:
            raise Violated(f"result.json does not say {name}, {record.key} says {told}")
        if differ(_as_stored(result[name]), told):
            raise Violated(f"result.json says {name} {result[name]}, {record.key} says {told}")
    _check_skipped(run, result)
    _check_end(run, result)
    _check_truncated(run, result)
    if reference is not None:
        theirs = result_of(reference)
        for name in _BOTH:
            if name in result and name in theirs and differ(_known(result, name), _known(theirs, name)):
                raise Violated(f"{name} is {result[name]}, without faults it is {theirs[name]}")
    return f"result.json and {record.key} agree; ended by {result.get('ended_by')}, {_rows_cut(result)}"


def last_record(run: Evidence) -> Commit | None:
    """Return the newest commit record of the job's last step."""
    last = shape_of(run).total_steps
    found = [commit for commit in run.commits if commit.fields is not None and commit.fields.get("step") == last]
    return max(found, key=lambda commit: commit.key, default=None)


def _told_by(record: Line) -> dict[str, object]:
    """Return the result fields that a record determines, as far as its version has them."""
    told = {name: record.get(name) for name in _FIELDS if name in record or name == "improvement"}
    told |= {name: record.get(name) or [] for name in _RANGES}
    if "account" in record:
        account = part(record, "account")
        told |= {name: account.get(key) for name, key in _ACCOUNT.items()}
    return told


def _as_stored(value: object) -> object:
    """Return a value as a record stores it: non-finite numbers are None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return {name: _as_stored(each) for name, each in value.items()} if isinstance(value, dict) else value


def _known(result: Line, name: str) -> object:
    """Return the part of a field on which two runs must agree: holes and improvements without times and terms."""
    return _as_stored(result[name])


def _check_skipped(run: Evidence, result: Line) -> None:
    """Steps without an update have no target, or a non-finite loss or gradient; all are in the lineage."""
    said, steps = skipped_steps(result), {one.step: one for one in lineage_of(run)}
    if beyond := sorted(said - steps.keys()):
        raise Violated(f"result.json says that step {beyond[0]} has no update, which the job does not have")
    for step in sorted(said):
        if not is_empty(steps[step]) and is_finite(run, steps[step]):
            raise Violated(f"result.json says that step {step} has no update, and its loss and gradient were finite")


def _check_end(run: Evidence, result: Line) -> None:
    """The end's reason, the epochs and the last world size follow from configuration and histories."""
    shape, term = shape_of(run), whole(result, "term")
    is_early = is_stopped_early(run)
    if is_early and not check_improvement(run, "result.json", result):
        raise Unknown("the job was ended by early stopping, and not all of the validations before were logged")
    due = "early stopping" if is_early else "last step"
    if result.get("ended_by") != due:
        raise Violated(f"result.json says that the job was ended by {result.get('ended_by')!r}, it was by {due!r}")
    if not isinstance(shape, MixedShape) and whole(result, "epochs") != len(shape.finished_epochs):
        raise Violated(f"result.json says {result['epochs']} epochs, {len(shape.finished_epochs)} were finished")
    if "world" in result and seats_of(run)[term] != whole(result, "world"):
        raise Violated(f"result.json says {result['world']} ranks, the world of term {term} had {seats_of(run)[term]}")


def _check_truncated(run: Evidence, result: Line) -> None:
    """Truncated rows are at most the rows read, and equal the last step's logged value."""
    cut, most = whole(result, "num_truncated"), shape_of(run).samples_before(shape_of(run).total_steps)
    data = part(run.config, "data") if "data" in run.config else {}
    if not 0 <= cut <= most:
        raise Violated(f"result.json says that {cut} rows were cut, {most} were read")
    if cut and data.get("too_long") != "truncate":
        raise Violated(f"result.json says that {cut} rows were cut, and data.too_long is {data.get('too_long')}")
    logged = [
        part(line, "values")["train/truncated"]
        for line in (run.metrics or {}).get(lineage_of(run)[-1].term, ())
        if line.get("step") == shape_of(run).total_steps and "train/truncated" in line.get("values", {})  # type: ignore[operator]
    ]
    if logged and logged[-1] != cut:
        raise Violated(f"result.json says that {cut} rows were cut, at the last step {logged[-1]} were logged")


def _rows_cut(result: Line) -> str:
    skipped = items(result, "skipped_steps") if "skipped_steps" in result else []
    return f"{result.get('num_truncated')} rows cut, {len(skipped)} ranges of steps without an update"


_ENDS_AT_ONCE = ("kill_worker", "kill_node")
_LATE_S = 5.0
"""Seconds after a kill within which its process may have stamped lines, as clocks differ a little."""


def faults(run: Evidence) -> str:
    """All faults took effect, and the processes' own lines contradict none.

    A fault that did not happen could otherwise explain any other failure in its window.
    """
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
