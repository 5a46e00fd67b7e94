"""Invariant of the delivery: the files of every remaining commit hold the weights that its record states.

The last commit's weights are also those of the result and of the run without faults. Other invariants read what the run
says; here the judge opens the files itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from chaos.judge.evidence.applied import result_of, shape_of
from chaos.judge.evidence.run_files import Commit, Evidence, Line, scenario_field, whole
from chaos.judge.evidence.stored_weights import Tensors, digest_of, first_nonfinite
from chaos.judge.findings import Unknown, Violated
from chaos.scenario.kinds import kind_of


def deliverable(run: Evidence, reference: Evidence | None) -> str:
    """Every commit loads with torch's own reader; the last one has the weights of the result and the reference.

    Commits damaged by a fault are skipped. The reference's commits are opened as well: `weights` compares records of
    equal steps, so each record must match its files.
    """
    result, last_step = result_of(run), shape_of(run).total_steps
    commits = sorted((commit for commit in run.commits if commit.fields is not None), key=_place)
    if not commits or run.load is None:
        raise Unknown("there is no commit whose files could be opened")
    last = max((commit for commit in commits if _step(commit) == last_step), key=_place, default=None)
    if last is None and result["status"] == "done":
        raise Violated(f"the job ended at step {last_step}, the newest commit is of step {_step(commits[-1])}")
    opened = undamaged(run, commits)
    if not opened:
        raise Unknown("every commit that is left was damaged by a fault")
    summary = ""
    for commit in opened:
        tensors = _load(run, commit)
        claims: dict[str, Line] = {commit.key: commit.fields or {}}
        if commit is last:
            others = {"the result": result, "the run without faults": (reference.result if reference else None) or {}}
            claims |= {whose: fields for whose, fields in others.items() if "weights_sha256" in fields}
        found = _check_weights(commit.key, tensors, claims)
        summary = f"{len(tensors)} tensors of {commit.key}, sha256 {found[:16]}: those of {', '.join(claims)}"
    summary += f"; of {len(opened)} commits that are left all files were read, and hold what the records say"
    summary += _check_reference(reference)
    return summary if last in (None, opened[-1]) else f"{summary}; a fault had damaged the last one, {last.key}"


def undamaged(run: Evidence, commits: list[Commit]) -> list[Commit]:
    """Return the commits whose files no fault has damaged."""
    spoilt = {
        f"commits/{fault['commit']}"
        for fault in run.of("fault")
        if kind_of(fault["kind"]).damages and fault.get("commit")
    }
    return [commit for commit in commits if commit.key not in spoilt]


def _check_reference(reference: Evidence | None) -> str:
    """Open all commits of the run without faults; return their number in words."""
    if reference is None or reference.load is None:
        return ""
    commits = [commit for commit in reference.commits if commit.fields is not None]
    for commit in commits:
        try:
            _check_weights(commit.key, _load(reference, commit), {commit.key: commit.fields or {}})
        except Violated as violation:
            raise Violated(f"the run without faults: {violation}") from violation
    return f", as in {len(commits)} of the run without faults"


def _check_weights(key: str, tensors: Tensors, claims: Mapping[str, Line]) -> str:
    """Return the weights' hash; raise Violated if a claim differs."""
    for whose, fields in claims.items():
        found = digest_of(tensors, fields)
        if (claimed := fields.get("weights_sha256")) != found:
            raise Violated(f"the files of {key} hold weights of sha256 {found[:16]}, {whose} says {str(claimed)[:16]}")
    return digest_of(tensors, claims[key])


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
