"""The report shows the evidence in one self-contained page, even for torn or huge evidence."""

from __future__ import annotations

import ast
import json
import math
import random
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import chaos
from chaos.judge.evidence.recovery_cost import Recovery
from chaos.judge.evidence.run_files import Evidence, Line, collect
from chaos.judge.verdict import Verdict, examine, weigh
from chaos.planted.catalogue import PLANTED, Planted
from chaos.report import render
from chaos.report.cells import moments_grid, points_grid
from chaos.report.page import demand
from chaos.report.reading import Reader
from chaos.report.story import story_of
from elastic_train.drawing.svg import Axis, path
from tests.chaos.recorded import STEPS, record

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("weights_loaded_once")]

BEGAN = 1_800_000_000.0


@dataclass(frozen=True)
class Crowd:
    """Numbers of nodes of one rank, of terms and of steps per term; no commit has a term's last `lost` steps."""

    nodes: int = 1000
    terms: int = 40
    steps: int = 8
    lost: int = 3
    seed: int = 1


def gather(crowd: Crowd) -> Evidence:
    """Return the evidence of a job in which every term but the last ends with one killed node, which returns later."""
    draws = random.Random(crowd.seed)
    chaos: list[Line] = [{"op": "scenario", "t": BEGAN, "name": "crowd", "seed": crowd.seed, "recovery": "restart"}]
    processes: list[list[Line]] = [chaos]
    up = set(range(crowd.nodes))
    now, step, pid = BEGAN, 0, 1000
    for term in range(1, crowd.terms + 1):
        now += 5.0
        ranks = sorted(up)
        for rank, node in enumerate(ranks):
            pid += 1
            chaos.append({"op": "node", "t": now, "node": node, "pids": [pid]})
            processes.append(_process(crowd, term, rank, len(ranks), pid, now, step))
        now += crowd.steps + 1.0
        commit = {"op": "commit", "t": now - 0.1, "term": term, "rank": 0, "step": step + crowd.steps - crowd.lost}
        key = f"commits/{term:08d}-{step + crowd.steps - crowd.lost:012d}.json"
        processes[-len(ranks)].append({**commit, "key": key, "digest": f"{term:064d}", "parent": None, "seconds": 0.1})
        step += crowd.steps - crowd.lost
        if term < crowd.terms:
            victim = draws.choice(ranks)
            up = (set(range(crowd.nodes)) if term % 5 == 0 or 2 * len(up) <= crowd.nodes else up) - {victim}
            moment = {
                "seen_step": step + crowd.lost,
                "term": term,
                "pids": [pid - len(ranks) + 1 + ranks.index(victim)],
            }
            chaos.append({"op": "fault", "t": now + 0.2, "kind": "kill_node", "node": victim, **moment})
    return Evidence(Path("crowd"), processes, [], {}, None, None)


def _process(crowd: Crowd, term: int, rank: int, world: int, pid: int, now: float, step: int) -> list[Line]:
    who = {"term": term, "rank": rank}
    form = {"op": "form", "t": now, **who, "world": world, "pid": pid, "cause": "lost", "sealed_at": now - 0.5}
    restore = {"op": "restore", "t": now + 0.5, **who, "step": step, "commit": None}
    place = {"epoch": 0, "lanes": [rank, rank + 1], "world": world, "num_samples": world}
    steps = [
        {
            "op": "step",
            "t": now + 1.0 + number,
            **who,
            "step": step + number,
            "lo": 0,
            "hi": 1,
            **place,
            "loss": 1 / number,
        }
        for number in range(1, crowd.steps + 1)
    ]
    return [form, restore, *steps]


class Element:
    """An element of a page, with the text below it."""

    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag, self.attributes, self.text = tag, attributes, ""


class Page(HTMLParser):
    """All elements of a page, each with its section."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, Element]] = []
        self._open: list[Element] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open.append(element)
        sections = [item.attributes.get("id", "") for item in self._open if item.tag == "section"]
        self.elements.append((sections[-1] if sections else "", element))
        if tag in ("meta", "br"):
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def find(self, section: str, tag: str, class_: str = "") -> list[Element]:
        return [
            element
            for where, element in self.elements
            if where == section
            and element.tag == tag
            and class_ in ["", *element.attributes.get("class", "").split(" ")]
        ]

    def sum(self, section: str, attribute: str) -> int:
        return sum(int(item.attributes.get(attribute, 0)) for where, item in self.elements if where == section)


def judged(folder: Path) -> Verdict:
    return weigh(collect(folder / "faulted"), collect(folder / "reference"))


def planted(name: str, healthy: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(healthy, folder)
    next(planted for planted in PLANTED if planted.name == name).plant(folder / "faulted")
    return folder


def rewrite(folder: Path, file: str, change: dict[str, object], op: str) -> None:
    """Change fields of every line of an operation in one history."""
    path = folder / "faulted" / "history" / file
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, **(change if line["op"] == op else {})}) + "\n" for line in lines))


def test_everything_on_the_page_is_in_the_evidence(healthy: Path) -> None:
    """Each fault has a band and a row, each commit a mark, each recovery its cost, each dead branch its steps."""
    verdict = judged(healthy)
    page, run = Page(render(verdict)), verdict.run
    for section in ("lanes", "cursor"):
        assert page.sum(section, "data-faults") == len(run.of("fault")) == 2
    assert len(page.find("costs", "tr")) == 1 + 2 + 1 + 2
    assert page.sum("cursor", "data-commits") == len(run.of("commit"))
    prices = {
        (item.attributes["data-rpo"], item.attributes["data-rto"]) for item in page.find("cursor", "rect", "price")
    }
    assert prices == {(str(cost.rpo_steps), f"{cost.rto_s:.3f}") for cost in verdict.recoveries}
    (dead,) = page.find("lineage", "path", "dead-branch")
    assert dead.text == "term 1: 3 steps given up, 11 to 13"
    spans = [item for item in page.find("lanes", "rect") if item.attributes["class"] != "band"]
    assert len(spans) == len(run.of("form")) == 2 + 1 + 3
    covered = page.find("coverage", "rect")
    assert {item.attributes["class"] for item in covered} == {"covered"}
    assert [item.text.partition(",")[0] for item in covered] == [*(f"epoch {epoch}" for epoch in range(6)), "witness"]
    assert f"0 of {STEPS} steps have another loss" in page.find("loss", "p")[0].text
    assert page.find("", "pre")[0].text == "elastic-chaos run recorded --seed 7"
    assert "Made from the run's files alone; `elastic-chaos check` makes" in page.find("", "footer")[0].text


def test_every_invariant_has_a_row(healthy: Path) -> None:
    """Name, verdict and reason, in the order of the verdict."""
    verdict = judged(healthy)
    rows = Page(render(verdict)).find("invariants", "tr")[1:]
    assert [row.attributes["class"] for row in rows] == [finding.truth for finding in verdict.findings]
    for row, finding in zip(rows, verdict.findings, strict=True):
        assert row.text.startswith(finding.invariant)
        assert finding.why in row.text


@pytest.mark.parametrize(
    ("name", "section", "class_"),
    [
        ("witness-swap", "coverage", "missing"),
        ("witness-swap", "coverage", "repeated"),
        ("repeat", "coverage", "repeated"),
        ("idle-lane", "coverage", "missing"),
        ("different-losses", "loss", "differs"),
    ],
)
def test_a_violation_is_shown_where_it_happened(
    healthy: Path, tmp_path: Path, name: str, section: str, class_: str
) -> None:
    """A planted bug's witness is shown in words, with its mark in the figure."""
    verdict = judged(planted(name, healthy, tmp_path))
    page = Page(render(verdict))
    (wrong, *_) = [finding for finding in verdict.findings if finding.truth == "false"]
    assert any(wrong.why in row.text for row in page.find("invariants", "tr", "false"))
    assert page.find(section, "rect", class_) + page.find(section, "circle", class_)


ONE_OF_EACH = {bug.invariant: bug for bug in PLANTED}.values()
"""A planted bug for each invariant."""


@pytest.mark.parametrize("bugs", [ONE_OF_EACH, pytest.param(PLANTED, marks=pytest.mark.hunt)], ids=["some", "all"])
def test_a_run_with_a_planted_bug_has_a_page(healthy: Path, tmp_path: Path, bugs: Iterable[Planted]) -> None:
    for bug in bugs:
        folder = planted(bug.name, healthy, tmp_path / bug.name)
        assert len(Page(render(judged(folder))).find("invariants", "tr")) > 10


def test_torn_evidence_has_a_page(healthy: Path, tmp_path: Path) -> None:
    """Wherever histories are cut, and whatever fields are lost, the page is complete."""
    folder = tmp_path / "cut"
    for place, part in enumerate((0.0, 0.3, 0.97)):
        shutil.copytree(healthy, folder / str(place))
        for file in (folder / str(place) / "faulted" / "history").iterdir():
            file.write_bytes(file.read_bytes()[: int(part * file.stat().st_size)])
        (folder / str(place) / "faulted" / "result.json").write_text('{"status": "do')
        assert "not valid" in render(judged(folder / str(place)))
    evidence = collect(healthy / "faulted")
    for key in ("t", "term", "rank", "step", "pid", "node", "kind", "loss"):
        lines: list[list[Line]] = [
            [{name: value for name, value in line.items() if name != key} for line in process]
            for process in evidence.processes
        ]
        assert Page(render(weigh(replace(evidence, processes=lines), None))).find("lanes", "p")


def test_a_dead_branch_that_others_passed_over_cuts_nothing_off() -> None:
    """Term 2 continued from step 2 with a process of an older world; term 3 from step 5, with one still in term 1."""

    def lines_of(term: int, pid: int, step: int, applied_by: int | None, applied: range) -> list[Line]:
        at = 10.0 * term
        return [
            {"op": "form", "t": at, "term": term, "rank": 0, "pid": pid, "world": 1},
            {"op": "restore", "t": at, "term": term, "rank": 0, "step": step, "commit": None, "applied_by": applied_by},
            *(
                {"op": "step", "t": at + 0.1 * one, "term": term, "rank": 0, "step": one, "loss": 1.0}
                for one in applied
            ),
        ]

    lines = [
        *lines_of(1, 7, 0, None, range(1, 6)),
        *lines_of(2, 8, 2, 1, range(3, 5)),
        *lines_of(3, 7, 5, 1, range(6, 9)),
    ]
    story = story_of(Reader(Evidence(Path("drawn"), [lines], [], {}, None, None)))
    assert [(branch.term, branch.lo, branch.cut, branch.hi) for branch in story.branches] == [
        (1, 0, 5, 5),
        (2, 2, 2, 4),
        (3, 5, 8, 8),
    ]


def test_text_from_a_run_cannot_become_markup(folder: Path) -> None:
    """Names are shown literally, in text, titles and attributes."""
    evil = "</title><script>alert(1)</script><img src=x onerror='x'>\"'"
    rewrite(folder, "chaos.jsonl", {"name": evil}, "scenario")
    rewrite(folder, "chaos.jsonl", {"kind": evil}, "fault")
    page = Page(render(judged(folder)))
    assert not {"script", "img"} & {element.tag for _, element in page.elements}
    assert evil in page.find("", "h1")[0].text
    assert evil in page.find("cells", "th")[7].text


def test_a_page_is_a_function_of_the_evidence_and_needs_nothing_else(healthy: Path, tmp_path: Path) -> None:
    """The same evidence elsewhere gives the same bytes; nothing is fetched or executed."""
    html = render(judged(healthy))
    shutil.copytree(healthy, tmp_path / "elsewhere")
    assert render(judged(tmp_path / "elsewhere")) == html
    page = Page(html)
    assert not {"script", "link", "iframe", "img", "object"} & {element.tag for _, element in page.elements}
    assert not {"src", "href", "style", "srcset"} & {name for _, item in page.elements for name in item.attributes}
    assert "url(" not in html
    assert html.replace('xmlns="http://www.w3.org/2000/svg"', "").count("://") == 0


def test_a_thousand_nodes_are_readable() -> None:
    """Nodes share rows of a strip; the page is far below 2 MB and has every fault and commit."""
    run = gather(Crowd(nodes=1000, terms=7, steps=3, lost=1))
    verdict = weigh(run, None)
    html = render(verdict)
    page = Page(html)
    assert len(html) < 300_000
    assert len(story_of(Reader(run)).lanes) == 1000
    assert page.sum("lanes", "data-faults") == page.sum("cursor", "data-faults") == 6
    assert page.sum("cursor", "data-commits") == 7
    lost = [item.text for item in page.find("lineage", "path", "dead-branch")]
    assert len(lost) == 6
    assert all(": 1 step given up" in title for title in lost)
    strips = [item.text for item in page.find("lanes", "path") if "level" in item.attributes.get("class", "")]
    for term in range(1, 8):
        assert f"term {term}: 75 to 100 % of a row's processes train in it" in strips


def test_a_thousand_terms_stay_small() -> None:
    """However many worlds there are, marks of one kind are drawn as one, and the page is far below 2 MB."""
    run = gather(Crowd(nodes=4, terms=1000, steps=3, lost=1))
    costs = [
        Recovery(place, "kill_node", 0, fault["t"], fault["term"] + 1, 1, 6.8, 1, 1, 1, 1)  # type: ignore[arg-type, operator]
        for place, fault in enumerate(run.of("fault"))
    ]
    fields = weigh(gather(Crowd(nodes=4, terms=2)), None).fields
    html = render(Verdict(run, None, [], costs, fields))
    assert len(html) < 1_500_000
    assert Page(html).sum("cursor", "data-faults") == 999


def test_processes_are_drawn_in_their_nodes_lanes() -> None:
    """The executor's lines place a process; an unplaced one gets a slot, which later processes share."""
    run = gather(Crowd(nodes=3, terms=3, steps=2, lost=1))
    lanes = story_of(Reader(run)).lanes
    assert [lane.name for lane in lanes] == ["node 0", "node 1", "node 2"]
    assert sum(len(lane.spans) for lane in lanes) == len(run.of("form"))
    placed = {pid: line["node"] for line in run.of("node") for pid in line["pids"]}  # type: ignore[attr-defined]
    for lane in lanes:
        assert {placed[span.pid] for span in lane.spans} == {lane.node}
        assert len(lane.tracks) == 1
    unplaced = replace(run, processes=[[line for line in process if line["op"] != "node"] for process in run.processes])
    slots = [lane for lane in story_of(Reader(unplaced)).lanes if lane.node is None]
    assert 0 < len(slots) <= 3
    assert all(
        before.hi <= after.lo for lane in slots for before, after in zip(lane.spans, lane.spans[1:], strict=False)
    )


def test_cells_that_were_never_hit_are_listed(healthy: Path, folder: Path) -> None:
    """Acts that the executor supports but did not do are listed as never; without its list only done ones are known."""
    reader = Reader(collect(healthy / "faulted"))
    assert not moments_grid(reader, story_of(reader)).is_listed
    fields = {
        "kinds": ["kill_node", "start_node", "freeze_node"],
        "points": ["commit", "form"],
        "point_kinds": ["kill"],
    }
    rewrite(folder, "chaos.jsonl", fields, "scenario")
    path = folder / "faulted" / "history" / "chaos.jsonl"
    fault = {"op": "fault", "t": 1_800_000_002.0, "kind": "kill@commit", "node": 0, "seen_step": 1, "pids": [1]}
    path.write_text(path.read_text() + json.dumps(fault) + "\n")
    reader = Reader(collect(folder / "faulted"))
    moments, points = moments_grid(reader, story_of(reader)), points_grid(reader, story_of(reader))
    assert dict(moments.hits) == {("kill_node", "computing"): 1, ("start_node", "computing"): 1}
    assert ("freeze_node", "computing") in moments.never
    assert len(moments.never) == 3 * len(moments.columns) - 2
    assert (dict(points.hits), points.never) == ({("commit", "kill"): 1}, [("form", "kill")])


def test_the_report_imports_nothing_from_what_is_judged() -> None:
    """Otherwise it would show the trainer's own view."""
    folder = Path(chaos.__file__).parent / "report"
    for source in (file for file in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names = [name for name in names if not name.startswith("elastic_train.drawing.")]  # it knows of no run
            assert not {"elastic_train", "rendezvous", "torch"} & {name.partition(".")[0] for name in names}, source


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(-100, 100)), min_size=1, max_size=400))
def test_a_long_curve_keeps_its_extremes(points: list[tuple[float, float]]) -> None:
    """However dense the points, at most four are drawn per unit of width: both ends, the lowest and the highest."""
    points.sort(key=lambda point: point[0])
    drawn = path(points).replace("L", "M").split("M")[1:]
    columns = {math.floor(x) for x, _ in points}
    assert len(drawn) <= 4 * len(columns)
    heights = [float(item.split(" ")[1]) for item in drawn]
    assert min(heights) == round(min(y for _, y in points), 1)
    assert max(heights) == round(max(y for _, y in points), 1)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 12))
def test_ticks_are_few_and_within_the_axis(lo: float, span: float, most: int) -> None:
    """An axis has at most one tick more than requested, and none outside its range."""
    ticks = Axis(lo, lo + span).ticks(most)
    assert len(ticks) <= most + 1
    assert all(lo - 1e-6 * span <= tick <= lo + span + 1e-6 * span for tick in ticks)


def test_every_invariant_says_in_a_sentence_what_it_demands(tmp_path: Path) -> None:
    verdict = examine(record(tmp_path / "run"))
    demands = {finding.invariant: demand(finding) for finding in verdict.findings}
    assert [name for name, text in demands.items() if not text.endswith(".")] == []
    assert demands["partition"].endswith("or to one compute group in cells.")
