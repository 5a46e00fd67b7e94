"""Invariant of what a run delivers: the last commit's files hold the weights of the result, and these are numbers.

Every other invariant reads what the run says. Here the judge opens the files itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from chaos.judge.evidence.applied import result_of, shape_of
from chaos.judge.evidence.run_files import Commit, Evidence, Line, scenario_field, whole
from chaos.judge.evidence.stored_weights import Tensors, digest_of, first_nonfinite
from chaos.judge.findings import Unknown, Violated
from chaos.scenario.kinds import damages


def deliverable(run: Evidence, reference: Evidence | None) -> str:
    """The last commit loads with torch's own reader, and holds the weights of its record, the result, the reference.

    One that a fault has damaged is passed over: then the newest that none has is compared with its own record.
    """
    result, last_step = result_of(run), shape_of(run).total_steps
    commits = sorted((commit for commit in run.commits if commit.fields is not None), key=_place)
    if not commits or run.load is None:
        raise Unknown("there is no commit whose files could be opened")
    last = max((commit for commit in commits if _step(commit) == last_step), key=_place, default=None)
    if last is None and result["status"] == "done":
        raise Violated(f"the job ended at step {last_step}, the newest commit is of step {_step(commits[-1])}")
    chosen = last or commits[-1]
    spoilt = {
        f"commits/{fault['commit']}" for fault in run.of("fault") if damages(fault["kind"]) and fault.get("commit")
    }
    if chosen.key in spoilt:
        whole_ones = [commit for commit in commits if commit.key not in spoilt]
        if not whole_ones:
            raise Unknown("every commit that is left was damaged by a fault")
        chosen = whole_ones[-1]
    tensors = _load(run, chosen)
    claims: dict[str, Line] = {chosen.key: chosen.fields or {}}
    if chosen is last:
        others = {"the result": result, "the run without faults": (reference.result if reference else None) or {}}
        claims |= {whose: fields for whose, fields in others.items() if "weights_sha256" in fields}
    found = _check_weights(chosen.key, tensors, claims)
    summary = f"{len(tensors)} tensors of {chosen.key}, sha256 {found[:16]}: those of {', '.join(claims)}"
    return summary if last in (None, chosen) else f"{summary}; a fault had damaged the last one, {last.key}"


def _check_weights(key: str, tensors: Tensors, claims: Mapping[str, Line]) -> str:
    """Return the weights' hash; raise Violated if one that is claimed is another by the rule of its own version."""
    for whose, fields in claims.items():
        found = digest_of(tensors, whole({"format": 2, **fields}, "format"))
        if (claimed := fields.get("weights_sha256")) != found:
            raise Violated(f"the files of {key} hold weights of sha256 {found[:16]}, {whose} says {str(claimed)[:16]}")
    return digest_of(tensors)


def _load(run: Evidence, commit: Commit) -> Tensors:
    assert run.load is not None and commit.fields is not None, "looked at before"
    tensors = run.load(commit.fields)
    if not tensors:
        raise Violated(f"{commit.key} holds no weights")
    if (name := first_nonfinite(tensors)) is not None and not scenario_field(run, "nonfinite"):
        raise Violated(f"{commit.key}: {name} holds numbers that are not finite, and the scenario does not allow that")
    return tensors


def _place(commit: Commit) -> tuple[int, int]:
    assert commit.fields is not None, "looked at before"
    return whole(commit.fields, "term"), whole(commit.fields, "step")


def _step(commit: Commit) -> int:
    return _place(commit)[1]
