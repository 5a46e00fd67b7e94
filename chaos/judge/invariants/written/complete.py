"""Invariant of completeness: every required file exists and can be read.

Other invariants judge what is written, so deleted lines, such as exits or validations, would go unnoticed; this one
requires every kind of line that a run of this shape must have.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from itertools import chain

from chaos.judge.evidence.applied import lineage_of, restored_at, result_of, shape_of, validated_every
from chaos.judge.evidence.identities import AGAIN
from chaos.judge.evidence.run_files import Evidence, Line, items, number, part, whole
from chaos.judge.findings import Unknown, Violated
from chaos.judge.invariants.exactly_once.agreement import differ
from chaos.scenario.kinds import asks_all_to_leave

_KEPT_TERMS = 100
"""Claims of terms older than the newest by more than this may have been deleted."""
_PROCESS = ("host", "boot", "born")
_ENDS_NODES = ("kill_node", "stop_node", "kill_job", "start_twin")
"""Kinds that end a node's agent; for a twin its undoing does."""


_FIELDS = {
    "form": "term rank world pid cause joined_at sealed_at started_at",
    "restore": "term rank step epoch offset commit seconds skipped resumed",
    "step": "term rank step epoch lo hi lanes num_samples world loss",
    "commit": "term rank step key digest parent weights_sha256 seconds",
    "validate": "term rank step",
    "end": "term rank status step weights_sha256 coverage",
    "scenario": "name seed",
    "node": "node pids",
    "fault": "kind pids seen_step",
    "effect": "fault kind proof",
    "exit": "node code",
    "clean": "orphans",
    "why": "do exit_code of_rank sentence",
}
"""Required fields of lines by operation (docs/formats.md, History lines)."""
_KINDS: dict[type | tuple[type, ...], str] = {
    int: "term rank step epoch lo hi num_samples num_left_out world pid number fault offset steps_lost lost",
    (int, float): "t joined_at sealed_at started_at created_at stall_s patience_s",
    str: "op cause key digest weights_sha256 kind status proof why",
    list: "lanes skipped pids nodes orphans drafts shared_memory",
    dict: "coverage",
    (int, type(None)): "given_by applied_by node at_step seen_step seen_commit code",
    (int, float, type(None)): "for_s loss",
    (str, type(None)): "commit parent signal point",
    (dict, type(None)): "resumed",
    (list, type(None)): "leases",
    bool: "is_drawn unsettled again holds_nothing reference nonfinite",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}
"""Type of a value by its name. Other values are unused, or checked by the invariant that reads them."""
_OPS = {
    *_FIELDS,
    *("rollback", "leave", "read", "unformed", "phases", "memory", "event", "nonfinite", "unwritable", "no_progress"),
    *("undo", "missed", "horizon", "healed", "stopped", "stuck", "unfit", "failed", "script", "unseen"),
}
_FREE = {"event", "phases", "memory", "read", "nonfinite"}
"""Operations whose values are measurements, or are checked by the one invariant that reads them."""
_CONFIG = {
    "run": "seed",
    "data": "train validation block_row_groups",
    "batch": "global_batch micro_batch",
    "validation": "every max_samples weights early_stopping",
    "checkpoint": "url keep_last",
    "task": "path",
    "tracking": "mlflow_uri",
}
"""Configuration keys that the judge reads; the file is written with all of them."""


def complete(run: Evidence) -> str:
    """Every file can be read, and the required nodes, terms, validations and logged values are there."""
    if run.unreadable:
        raise Violated(run.unreadable[0])
    _check_config(run)
    for op, names in _FIELDS.items():
        for line in run.of(op):
            if absent := [name for name in names.split() if name not in line]:
                raise Unknown(
                    f"a line of `{op}` lacks {absent[0]} (of term {line.get('term')}, rank {line.get('rank')})"
                )
    _check_kinds(run)
    check_pointers(run)
    if result_of(run)["status"] != "done":
        raise Unknown("the job has not finished: its files are not complete yet")
    if run.has("effect") and not all("number" in fault for fault in run.of("fault")):
        raise Unknown("a fault has no number, by which its effect is known")
    num_nodes, num_terms, num_commits = _check_nodes(run), _check_terms(run), _check_commits(run)
    num_validations, num_logged = _check_validations(run), _check_logged(run)
    found = [f"the ends of {num_nodes} nodes"]
    found += [f"{num_terms} claims of terms"] if num_terms else []
    found += [f"the newest {num_commits} commits"] if num_commits else []
    found += [f"{num_validations} validations that were due"] if num_validations else []
    found += [f"values logged in {num_logged} terms"] if num_logged else []
    return f"every file can be read; {', '.join(found)} are there"


def _check_kinds(run: Evidence) -> None:
    """Every value has its type, and every operation is known."""
    is_unseen = any("shared_memory" in items(line, "unseen") for line in run.of("scenario") if "unseen" in line)
    for line in run.of("clean"):
        if not is_unseen and ("drafts" in line) != ("shared_memory" in line):
            raise Unknown("a line of `clean` says nothing of drafts, or of shared memory")
    for line in chain.from_iterable(run.processes):
        if line["op"] not in _OPS:
            raise Violated(f"a line is of an operation `{line['op']}`, which there is not")
        if line["op"] in ("node", "exit") and line.get("node") is None:
            raise Violated(f"a line of `{line['op']}` names no node")
        for name, value in line.items() if line["op"] not in _FREE else ():
            kind = _KIND_OF.get(name, object)
            is_wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object))
            if is_wrong and not (name == "term" and value is None and line["op"] == "fault"):
                raise Violated(f"a line of `{line['op']}` says {name} {str(value)[:40]!r}, of another kind")


def _check_config(run: Evidence) -> None:
    if not run.config:
        raise Violated("config.yaml is not there or is empty")
    for section, names in _CONFIG.items():
        found = run.config.get(section)
        if not isinstance(found, dict):
            raise Unknown(f"config.yaml has no section {section}")
        if absent := [name for name in names.split() if name not in found]:
            raise Unknown(f"config.yaml lacks {section}.{absent[0]}")
    if absent := [name for name in ("epochs", "max_steps") if name not in run.config]:
        raise Unknown(f"config.yaml lacks {absent[0]}")
    batch = part(run.config, "batch")
    if whole(batch, "global_batch") % whole(batch, "micro_batch"):
        raise Violated("config.yaml: batch.global_batch is not a multiple of batch.micro_batch")


def _check_nodes(run: Evidence) -> int:
    """Every process has a node, and every node an end, unless a fault ended it; return the number of nodes."""
    if not run.has("scenario"):
        raise Unknown("the executor's description of the run (`scenario`) is missing")
    nodes = {line["node"] for line in run.of("node")}
    placed = {pid for line in run.of("node") for pid in items(line, "pids")}
    if not nodes:
        raise Unknown("no line says on which nodes processes ran (`node`)")
    ended = {line["node"] for line in run.of("exit")}
    for node in sorted(nodes - ended, key=str):
        done = [line["kind"] for line in [*run.of("fault"), *run.of("undo")] if _is_of(line, node)]
        if not any(kind in _ENDS_NODES or asks_all_to_leave(kind) for kind in done):
            raise Unknown(f"no line says how node {node} ended (`exit`), and no fault ended it")
    last = whole(result_of(run), "term")
    for line in run.in_term("end", last):
        member = next((x for x in run.in_term("form", last) if x["rank"] == line["rank"]), None)
        if member is not None and member["pid"] not in placed:
            raise Unknown(
                f"no line says on which node process {member['pid']} ran (`node`), rank {line['rank']} at the end"
            )
    return len(nodes)


def _check_terms(run: Evidence) -> int:
    """Every term that formed a world was claimed by that world's rank 0; return the number of claims."""
    if run.terms is None:
        return 0
    formed = {whole(line, "term"): line for line in run.of("form") if line["rank"] == 0}
    for term, line in sorted(formed.items()):
        if term + _KEPT_TERMS < max(formed):
            continue
        claim = run.terms.get(term)
        if claim is None:
            raise Violated(f"term {term} formed a world, and terms/{term:08d}.json, its claim, is not there")
        if "run_id" not in claim:
            raise Violated(f"terms/{term:08d}.json does not say which job claimed the term (`run_id`)")
        if claim["run_id"] != (first := run.terms[min(run.terms)].get("run_id")):
            raise Violated(f"terms/{term:08d}.json is of the job {claim['run_id']}, the first term's claim of {first}")
        due = {"pid": whole(line, "pid") % AGAIN, **{key: line.get(key) for key in _PROCESS}}
        for key, value in due.items() if claim.keys() & set(_PROCESS) else ():  # older claims do not name their process
            if differ(claim.get(key), value):
                raise Violated(f"terms/{term:08d}.json: {key} is {claim.get(key)}, rank 0 of the term says {value}")
    return len(formed)


def _check_commits(run: Evidence) -> int:
    """As many of the newest commits are left as retention keeps, except those hit by faults; return their number."""
    kept = _section(run, "checkpoint").get("keep_last")
    if not isinstance(kept, int) or run.terms is None:
        return 0
    if run.commits and not run.of("commit"):
        raise Unknown("no line says that a commit was published (`commit`)")
    hit = {f"commits/{fault['commit']}" for fault in run.of("fault") if fault.get("commit")}
    left = {commit.key for commit in run.commits}
    published = sorted(left | {str(line["key"]) for line in run.of("commit")})[-kept:]
    for key in published:
        if key not in left | hit:
            raise Violated(f"{key} is not there: it is one of the newest {kept}, which retention keeps")
    return len(published)


def _check_validations(run: Evidence) -> int:
    """Every validation due in the lineage has begun; return how many were due.

    One due at a term's last step may have been cut off by the fault that ended the term.
    """
    data = _section(run, "data")
    if data.get("validation") is None:
        return 0
    every, last, due = validated_every(run), shape_of(run).total_steps, 0
    begun = {(line["term"], line["step"]) for line in run.of("validate")}
    lineage = lineage_of(run)
    for applied, after in zip(lineage, [*lineage[1:], None], strict=True):
        is_last = applied.step == last
        if not is_last and (every is None or applied.step % every):
            continue
        terms = {applied.term} | ({whole(result_of(run), "term")} if is_last else set())
        if not is_last and after is not None and after.term != applied.term:
            continue
        due += 1
        if not any((term, applied.step) in begun for term in terms):
            raise Unknown(f"no line says that the validation of step {applied.step} began (`validate`)")
    return due


def _check_logged(run: Evidence) -> int:
    """Every term in the lineage has logged values; return how many terms have.

    Rank 0 logs them, and may die with those of its last step: a term in which it applied one step may have none.
    """
    lineage = lineage_of(run)
    if run.metrics is None or not (applied := {one.term for one in lineage}):
        return 0
    by_rank_0 = Counter(one.term for one in lineage if any(line.get("rank") == 0 for line in one.lines))
    if not run.metrics:
        raise Unknown("metrics/ is not there: nothing that was measured was logged")
    for term in sorted(applied):
        lines = run.metrics.get(term)
        if not lines:
            raise Unknown(f"metrics/{term:08d}.jsonl is not there, and the lineage has steps of term {term}")
        begun = whole(restored_at(run)[term], "step")
        if by_rank_0[term] > 1 and not any("values" in line for line in lines):
            raise Unknown(f"metrics/{term:08d}.jsonl has no values, and term {term} applied steps from {begun} on")
        for line in lines:
            number(line, "t")
    return len(applied)


def _section(run: Evidence, name: str) -> Mapping[str, object]:
    return part(run.config, name) if name in run.config else {}


def _is_of(fault: Line, node: object) -> bool:
    return node in (items(fault, "nodes") if fault.get("nodes") else [fault.get("node")])


_WORD = 15


def check_pointers(run: Evidence) -> None:
    """Check head.json, mlflow.json and store-id, where they exist.

    Not verifiable, hence believed: the job's name in mlflow.json, the store's word in store-id, which no other file
    repeats, and which of the run's commits head.json names: a leader that was stopped may write it late.
    """
    if (head := _read(run, "head.json")) is not None:
        steps = {str(line["key"]): line["step"] for line in run.of("commit")}
        steps |= {commit.key: commit.fields["step"] for commit in run.commits if commit.fields is not None}
        key = str(head.get("commit"))
        if key not in steps or differ(head.get("step"), steps[key]):
            known = f"is of step {steps[key]}" if key in steps else "is no commit of the run"
            raise Violated(f"head.json names {key} of step {head.get('step')}, which {known}")
    if (link := _read(run, "mlflow.json")) is not None:
        ours, told = link.get("run_id"), (run.result or {}).get("mlflow_run_id")
        if told is not None and ours != told:
            raise Violated(f"mlflow.json names the run {ours}, result.json {told}")
        tracking = run.config.get("tracking")
        place = str(tracking.get("mlflow_uri") or "") if isinstance(tracking, dict) else ""
        ends = place.rpartition("://")[2].lstrip("./")  # a database's path is resolved
        if "@" not in place and not str(link.get("mlflow_uri")).endswith(ends):
            raise Violated(f"mlflow.json names the tracker {link.get('mlflow_uri')}, config.yaml {place}")
    path = run.folder / "store-id"
    word = path.read_text(errors="replace").strip() if path.is_file() else None
    if word is not None and (len(word) != _WORD or not set(word) <= set("0123456789abcdef")):
        raise Violated(f"store-id holds {word[:40]!r}, which is no word of a store")


def _read(run: Evidence, name: str) -> Line | None:
    path = run.folder / name
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise Violated(f"{name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise Violated(f"{name} does not hold a mapping")
    return found
