"""A run that has not ended, as far as it has come: up to its newest commit, so that it can be judged at any time."""

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
    """Return the evidence up to the newest commit, with a result that says so; the same if there is none.

    Steps after it may still be given up, and ranks be on their way, so they are left out.
    """
    whole_commits = [commit for commit in run.commits if commit.fields is not None]
    formed = [whole(line, "term") for line in run.of("form")]
    is_over = run.has("clean") and not run.has("stuck")  # nodes that have ended by then are recorded in any case
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
    """Return what a commit says of a mixture's sources, as a result would; but how often each was passed."""
    sources = (line for line in items(commit, "sources") if isinstance(line, dict))
    return [{**source, "applied": whole(part(source, "coverage"), "count")} for source in sources]


def _is_behind(line: Line, until: int) -> bool:
    return line["op"] in ("step", "end") and whole(line, "step") >= until + (line["op"] == "step")
