"""Evidence of an unfinished run, up to its newest commit, so that it can be judged at any time."""

from __future__ import annotations

from dataclasses import replace

from chaos.judge.evidence.run_files import (
    Evidence,
    Line,
    items,
    part,
    whole,
)


def so_far(run: Evidence) -> Evidence:
    """Return the evidence up to the newest commit, with a result of status `running`; unchanged without a commit.

    Later steps are left out: they may still be discarded, or ranks not be done with them.
    """
    whole_commits = [commit for commit in run.commits if commit.fields is not None]
    formed = [whole(line, "term") for line in run.of("form")]
    is_over = run.has("clean") and not run.has("stuck")  # ended nodes are recorded in any case
    if run.result is not None or is_over or not whole_commits or not formed:
        return run
    newest = max(whole_commits, key=lambda commit: commit.key).fields
    assert newest is not None, "only whole ones were taken"
    until = whole(newest, "step")
    result: Line = {
        "status": "stuck" if run.has("stuck") else "running",
        "step": until,
        "term": max(formed),
        "num_samples": run.rows,
        "coverage": newest["coverage"],
    }
    if run.sizes:
        result["sources"] = _sources_of(newest)
    kept = [[line for line in process if not _is_behind(line, until)] for process in run.processes]
    return replace(run, processes=kept, result=result)


def _sources_of(commit: Line) -> list[Line]:
    """Return a mixture's sources from a commit, as in a result but without the number of passes."""
    sources = (line for line in items(commit, "sources") if isinstance(line, dict))
    return [{**source, "applied": whole(part(source, "coverage"), "count")} for source in sources]


def _is_behind(line: Line, until: int) -> bool:
    return line["op"] in ("step", "end") and whole(line, "step") >= until + (line["op"] == "step")
