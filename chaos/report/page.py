"""Render all figures and tables of a run's report as one self-contained HTML page.

A pure function of the verdict and its evidence: no clock, network or script. A figure with torn evidence shows the
reason in its place; the rest of the page is unaffected.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from markupsafe import Markup

from chaos.judge.checker import CHECKS
from chaos.judge.evidence.copies import layout_of
from chaos.judge.evidence.script_samples import is_script
from chaos.judge.findings import Finding, Unknown, Violated
from chaos.judge.invariants import script_run as scripts
from chaos.judge.verdict import Verdict
from chaos.report.cells import moments_grid, points_grid
from chaos.report.figures.costs import costs_figure, prices
from chaos.report.figures.coverage import coverage_figure
from chaos.report.figures.cursor import cursor_figure
from chaos.report.figures.lanes import is_strip, lanes_figure
from chaos.report.figures.lineage import lineage_figure
from chaos.report.figures.loss import compared, loss_figure
from chaos.report.reading import Reader
from chaos.report.story import Story, story_of
from elastic_train.drawing.page import Drawn, Fact, draw, fill

_HERE = Path(__file__).parent
MOST_FAULTS = 500
"""Number of faults that the page lists individually."""


def render(verdict: Verdict) -> str:
    run, reference = verdict.run, verdict.reference
    reader = Reader(run)
    story = story_of(reader, verdict.recoveries)
    expected = story_of(Reader(reference)) if reference else None
    figures = {
        "lanes": _draw(lambda: lanes_figure(story)),
        "cursor": _draw(lambda: cursor_figure(story)),
        "lineage": _draw(lambda: lineage_figure(story)),
        "coverage": _draw(lambda: coverage_figure(run)),
        "loss": _draw(lambda: loss_figure(story, expected)),
        "costs": _draw(lambda: costs_figure(story)),
    }
    return fill(
        _HERE / "page.html.j2",
        {
            "title": f"{verdict.fields['scenario'] or 'a run'}, seed {verdict.fields['seed']}",
            "outcome": "valid" if verdict.is_valid else "not valid",
            "is_valid": verdict.is_valid,
            "summary": _summary(verdict, story),
            "headlines": _headlines(verdict, story),
            "replay": verdict.fields["replay"] or "the evidence does not say which command started this run",
            "findings": [(finding, demand(finding, is_script(run))) for finding in verdict.findings],
            "lanes_note": _lanes_note(story),
            "figures": figures,
            "has_witness": run.witness is not None,
            "losses": compared(story, expected),
            "prices": prices(story),
            "faults": story.faults,
            "most_faults": MOST_FAULTS,
            "grids": (
                (moments_grid(reader, story), "kind", "Kinds of fault, by what the job was doing"),
                (points_grid(reader, story), "failpoint", "Kinds of fault at failpoints"),
            ),
            "footnote": _footnote(story),
        },
    )


def demand(finding: Finding, is_of_script: bool = False) -> str:
    """Return an invariant's requirement: the first sentence of its check's description."""
    checks = {**scripts.INVARIANTS, "coverage": scripts.coverage} if is_of_script else CHECKS
    written = getattr(checks.get(finding.invariant), "__doc__", None) or ""
    paragraph = " ".join(written.partition("\n\n")[0].split())
    return paragraph[: paragraph.find(". ") + 1] or paragraph


def _draw(figure: Callable[[], Markup]) -> Drawn:
    return draw(figure, Violated, Unknown)


def _summary(verdict: Verdict, story: Story) -> str:
    truths = [finding.truth for finding in verdict.findings]
    began = datetime.fromtimestamp(story.began, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    trained = "" if is_script(verdict.run) else f", with {layout_of(verdict.run)}"
    return (
        f"{truths.count('true')} of {len(truths)} invariants are true, {truths.count('false')} false, "
        f"{truths.count('unknown')} unknown. The run began {began} and took {story.until:.1f} s{trained}."
    )


def _headlines(verdict: Verdict, story: Story) -> list[Fact]:
    fields, coverage = verdict.fields, verdict.fields["coverage"]
    assert isinstance(coverage, dict), "made by the verdict"
    rto = sorted(cost.rto_s for cost in verdict.recoveries)
    num_given_up = sum(branch.hi - branch.cut for branch in story.branches)
    ours, theirs = fields["weights_sha256"], fields["reference_weights_sha256"]
    same = "the same without faults" if ours == theirs else "not the same" if theirs else "no run without faults"
    worlds = [branch.world for branch in story.branches]
    terms = {branch.term for branch in story.branches} | {span.term for lane in story.lanes for span in lane.spans}
    return [
        ("faults", str(len(story.faults)), f"{len(rto)} recovered from"),
        ("terms", str(len(terms)), f"{min(worlds, default=0)} to {max(worlds, default=0)} ranks"),
        ("steps applied", str(story.furthest if story.branches else 0), f"{num_given_up} given up, computed again"),
        ("commits", str(len(story.commits)), f"{sum(not commit.is_kept for commit in story.commits)} on dead branches"),
        ("RPO, at most", _shown(fields["rpo_steps"], "{} steps"), "applied steps lost to a fault"),
        ("RTO, at most", _shown(rto[-1] if rto else None, "{:.2f} s"), _median(rto)),
        (
            "a sample counts",
            f"{_shown(coverage['min'])} to {_shown(coverage['max'])} ×",
            f"an epoch, of {_shown(coverage['samples'])}",
        ),
        ("weights SHA-256", str(ours)[:12] if ours else "–", same if ours else "the job did not finish"),
    ]


def _median(rto: list[float]) -> str:
    return f"p50 {rto[(len(rto) - 1) // 2]:.2f} s, to the next step" if rto else "nothing was recovered from"


def _shown(value: object, pattern: str = "{}") -> str:
    return "–" if value is None else pattern.format(value)


def _lanes_note(story: Story) -> str:
    slots = sum(lane.node is None for lane in story.lanes)
    are_slots = "1 lane is a slot" if slots == 1 else f"{slots} lanes are slots"
    unplaced = f" {are_slots} of processes whose node is not recorded." if slots else ""
    if is_strip(story):
        return f"{len(story.lanes)} lanes, which may share rows: the paler, the fewer of a row train.{unplaced}"
    return f"A lane a node, a bar for each of its ranks, coloured by term.{unplaced}"


def _footnote(story: Story) -> str:
    left_out = (
        f"{story.num_left_out} lines of the histories lack a field and are not drawn. " if story.num_left_out else ""
    )
    return f"{left_out}Made from the run's files alone; `elastic-chaos check` makes the same page again."
