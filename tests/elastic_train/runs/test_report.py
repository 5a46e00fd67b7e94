"""Reports about runs, among them about a real one."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from elastic_train.cli.main import main
from elastic_train.drawing.page import draw
from elastic_train.errors import ConfigError
from elastic_train.insight.phases import FILE, PHASES, Utilisation
from elastic_train.runs.figures import _rates, compute_figure
from elastic_train.runs.glance import look
from elastic_train.runs.goodput import changes, goodput, time_spent
from elastic_train.runs.page import render
from elastic_train.runs.report import RunReport, report_on
from elastic_train.runs.story import Story, read_story
from elastic_train.system.file_systems import STARTED_IN
from elastic_train.tracking.run_folder import RunFolder
from tests.conftest import start
from tests.elastic_train.runs.folders import SAMPLES, T0, begin, faulted
from tests.elastic_train.training.jobs import CLASSIFIER, config, succeed


def reported(folder: Path) -> RunReport:
    return report_on(str(folder), with_coverage=False)


def test_every_second_of_a_run_is_spent_on_one_thing(tmp_path: Path) -> None:
    """A validation, a save and a fault that undid three steps, each with the seconds that it took."""
    story = read_story(faulted(tmp_path).folder)
    spent = time_spent(story)
    assert {kind: round(seconds, 6) for kind, seconds in spent.items()} == {
        "steps": 17 + 60 - 0.25,
        "given up": 3.0,
        "saves": 0.25,
        "validation": 4.0,
        "starting": 1.0,
        "recovering": 5.0 + 0.5,
        "stopped": 0.0,
        "ending": 2.0,
    }
    assert sum(spent.values()) == pytest.approx(story.ended - story.began)
    assert goodput(spent) == pytest.approx(76.75 / 92.5)


def test_mfu_is_of_the_flops_and_the_peak_that_the_run_has_noted(tmp_path: Path) -> None:
    """Samples a second, by their operations, over what the ranks of each world could do."""
    run = faulted(tmp_path)
    assert report_on(str(run.folder)).mfu is None
    (run.folder / FILE).write_text(Utilisation(1e9, 0.0, 1e11).to_json())
    found = report_on(str(run.folder))
    assert found.mfu == found.hfu == pytest.approx(64.0 * 1e9 / (2 * 1e11))
    (run.folder / FILE).write_text(Utilisation(1e9, 3e8, 1e11).to_json())
    assert report_on(str(run.folder)).hfu == pytest.approx(1.3 * (found.mfu or 0))


def test_mfu_over_time_is_of_the_ranks_that_each_world_had(tmp_path: Path) -> None:
    """Drawn where it is known: the line's mean is of all the time, so that what a fault took shows as a gap in it."""
    run = faulted(tmp_path)
    title = "model FLOP/s utilisation, in per cent, over time of 1 runs"
    assert title not in render([reported(run.folder)])
    (run.folder / FILE).write_text(Utilisation(1e9, 0.0, 1e11).to_json())
    found = reported(run.folder)
    assert title in render([found])
    rates = [rate for _, rate in _rates(found.story, for_each_rank=True)]
    spell_s = (found.story.ended - found.story.began) / len(rates)
    samples = sum(step.num_samples / (world.size or 1) for world in found.story.worlds for step in world.kept)
    assert sum(rates) * spell_s == pytest.approx(samples) and min(rates) == 0.0
    assert {world.size for world in found.story.worlds} == {2}


@pytest.mark.parametrize("behind_s", [12.0, 1000.0])
def test_a_leader_whose_clock_is_behind_does_not_prevent_a_page(behind_s: float, tmp_path: Path) -> None:
    """The next world's rank 0 is on another machine, by whose clock it trained before the run began."""
    run = begin(tmp_path)
    run.world(1, lo=0, steps={1: 2.0, 2: 3.0, 3: 4.0, 4: 5.0})
    at = 6.0 - behind_s
    run.world(2, lo=4, steps={5: at + 1, 6: at + 2}, cause="lost", started=at - 1, restored=at)
    found = reported(run.folder)
    rates = [rate for _, rate in _rates(found.story)]
    assert rates == [pytest.approx(2 * SAMPLES / (5.0 / 3))] * 3, "its two steps are drawn at the beginning"
    assert "samples a second over time" in render([found])


def test_steps_that_a_later_world_did_not_continue_are_given_up(tmp_path: Path) -> None:
    first, second = read_story(faulted(tmp_path).folder).worlds
    assert ([step.step for step in first.given_up], first.cut, second.given_up) == ([18, 19, 20], 17, [])
    assert [step.step for step in second.kept] == list(range(18, 78))


def test_a_change_of_the_world_has_its_price(tmp_path: Path) -> None:
    [change] = changes(read_story(faulted(tmp_path).folder))
    assert (change.term, change.cause, change.step, change.steps_lost, change.is_fault) == (2, "lost", 17, 3, True)
    assert (change.rto_s, change.detect_s, change.form_s, change.restore_s) == (6.5, 0.5, 0.25, 0.125)


def test_a_world_without_a_step_costs_what_it_gave_up_once(tmp_path: Path) -> None:
    """The third world begins where the second did: what was lost was lost to the second."""
    run = begin(tmp_path)
    run.world(1, lo=0, steps={1: 2.0, 2: 3.0, 3: 4.0})
    run.world(2, lo=1, cause="lost", steps={}, restored=5.0)
    run.world(3, lo=1, cause="lost", steps={2: 8.0}, restored=7.0, size=1)
    found = changes(read_story(run.folder))
    assert [(change.steps_lost, change.rto_s) for change in found] == [(2, None), (0, 4.0)]
    assert [len(world.given_up) for world in read_story(run.folder).worlds] == [2, 0, 0]


def test_a_start_that_was_refused_gives_up_no_step(tmp_path: Path) -> None:
    """A process that ends before it has a state, as one whose configuration is another, continues nothing."""
    run = begin(tmp_path)
    run.world(1, lo=0, steps={1: 2.0, 2: 3.0}, extra=[(4.0, {"op": "end", "status": "preempted"})])
    refused = {"t": T0 + 5.0, "term": 2, "rank": 0, "op": "form", "world": 1, "cause": "start", "started_at": T0 + 4.5}
    run.write(f"history/{2:08d}-00000-{'a' * 12}.jsonl", [refused])
    run.world(3, lo=2, cause="start", started=6.0, restored=7.0, steps={3: 8.0})
    story = read_story(run.folder)
    assert [world.given_up for world in story.worlds] == [[], [], []] and story.step == 3
    assert [(change.step, change.steps_lost) for change in changes(story)] == [(2, 0), (2, 0)]
    assert time_spent(story)["given up"] == 0.0


def test_a_job_that_was_done_and_is_started_again_had_no_fault(tmp_path: Path) -> None:
    """For more steps, or by mistake; what is lost after that is a fault."""
    run, done = begin(tmp_path), {"op": "end", "status": "done"}
    run.world(1, lo=0, steps={1: 2.0, 2: 3.0}, extra=[(4.0, done)])
    run.world(2, lo=2, cause="start", started=5.0, restored=6.0, steps={}, extra=[(7.0, done)])
    run.world(3, lo=2, cause="start", started=8.0, restored=9.0, steps={3: 10.0})
    run.world(4, lo=2, cause="start", started=18.0, restored=19.0, steps={3: 20.0})
    found = changes(read_story(run.folder))
    assert [(change.is_fault, change.steps_lost) for change in found] == [(False, 0), (False, 0), (True, 1)]
    assert look(run.folder).step == 3
    spent = time_spent(read_story(run.folder))
    assert spent["stopped"] == 8.0, "until the job was started again as it was not done; not the seconds after it was"
    run.world(5, lo=3, cause="start", started=28.0, restored=29.0, steps={}, extra=[(30.0, done)])
    assert look(run.folder).step == 3, "where it begins, as long as it has no step"


def test_time_in_which_nobody_ran_the_job_is_no_recovery(tmp_path: Path) -> None:
    """A job that was started again an hour later; its process began 2 s before it had its state."""
    run = begin(tmp_path)
    run.world(1, lo=0, steps={1: 2.0, 2: 3.0}, extra=[(4.0, {"op": "end", "status": "preempted"})])
    run.world(2, lo=2, cause="start", started=3604.0, restored=3606.0, steps={3: 3607.0, 4: 3608.0})
    spent = time_spent(read_story(run.folder))
    assert (spent["stopped"], spent["starting"], spent["ending"], spent["recovering"]) == (3600.0, 3.0, 1.0, 0.0)


def test_states_of_runs(tmp_path: Path) -> None:
    """One that goes on, one that failed, one with one step, one without any history."""
    going = begin(tmp_path, "going")
    going.world(1, lo=0, steps={1: 2.0, 2: 3.0})
    going.metrics(1, 0, {1: 2.0})
    failed = begin(tmp_path, "failed")
    failed.world(1, lo=0, steps={1: 2.0})
    failed.metrics(1, 0, {1: 2.0}, "FAILED")
    empty = begin(tmp_path, "empty")
    found = [reported(run.folder) for run in (going, failed, empty)]
    assert [(each.state.partition(":")[0], each.step) for each in found] == [
        ("not ended", 2),
        ("failed", 1),
        ("not ended", 0),
    ]
    assert found[2].goodput is None
    assert any("there is no history" in note and "no step was applied" in note for note in found[2].notes)
    for each in found:
        assert "<h1>" in render([each])
        assert json.dumps(each.as_json(), allow_nan=False)


def test_a_torn_history_has_a_report(tmp_path: Path) -> None:
    """Lines without their end, of other types, without fields: what is left is shown, and missing steps are counted."""
    run = begin(tmp_path)
    run.world(1, lo=0, steps={1: 2.0, 2: 3.0, 5: 6.0})
    [path] = (run.folder / "history").glob("*-00000-*")
    with path.open("a") as file:
        for line in (
            "[1]",
            '{"op": "step"',
            '{"op": 7, "t": 1}',
            '{"op": "step", "t": "x"}',
            '{"op": "phases", "t": 9}',
        ):
            file.write(line + "\n")
        file.write('{"op": "event", "t": 1e9}\n{"op": "step", "t": 1700000007, "st')
    report = reported(run.folder)
    assert report.step == 5
    assert any(note.startswith("2 steps have no line") for note in report.notes)


def test_folders_that_are_no_runs_are_refused_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "file").touch()
    for name, why in (("other", "has neither config"), ("file", "is a file"), ("othr", "did you mean '.*other'")):
        with pytest.raises(ConfigError, match=why):
            read_story(tmp_path / name)
    with pytest.raises(SystemExit) as left:
        main(["report", str(tmp_path / "none"), str(tmp_path / "other")])
    assert left.value.code == 2
    printed = capsys.readouterr().err
    assert "does not exist" in printed and "is not a run's folder" in printed


class Tags(HTMLParser):
    """The elements of a page, and their titles by class."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names, self.attributes, self.titles, self._class = set[str](), set[str](), list[tuple[str, str]](), ""
        self._in_title = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self._in_title = tag == "title"
        if tag not in ("title", "svg"):
            self._class = dict(attrs).get("class") or ""

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.titles.append((self._class, data))

    def handle_endtag(self, tag: str) -> None:
        self._in_title = False

    def of(self, class_: str) -> list[str]:
        return [title for found, title in self.titles if class_ in found.split()]


def test_a_page_draws_what_was_given_up_and_where_worlds_began(tmp_path: Path) -> None:
    page = Tags(render([reported(faulted(tmp_path).folder)]))
    assert page.of("gone") == ["given up"]
    assert len(page.of("rule-fault")) == 2, "of loss and learning rate"
    assert all("term 2 from step 17, lost: 2 to 2 ranks, 3 steps lost" in title for title in page.of("rule-fault"))
    [band] = page.of("band")
    assert "lost, 6.5 s to the next step" in band
    assert sum("steps that count" in title for title in page.of("t0")) == 1


def test_heat_maps_show_the_rank_that_is_slow(tmp_path: Path) -> None:
    """In the newest world rank 1 computes 2.5 times as long; by its host, in the figure over steps."""
    page = Tags(render([reported(faulted(tmp_path).folder)]))
    cells = page.of("heat")
    assert "rank 1, beta: forward" not in cells
    assert f"rank 1: forward {25 / 60 * 1e3:.2f} ms a step" in cells
    assert f"rank 0: wait {30 / 60 * 1e3:.2f} ms a step" in cells
    assert "rank 1 on beta, steps to 77, term 2: 833.3 ms, +43% to the median" in cells


def test_runs_stand_side_by_side_on_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    """Names of folders are text; nothing is fetched, nothing is run; the same folders give the same bytes."""
    evil = "<script>alert(1)<"
    one, two = faulted(tmp_path, evil), faulted(tmp_path, "two")
    reports = [reported(one.folder), reported(two.folder)]
    html = render(reports)
    page = Tags(html)
    assert not {"script", "link", "img", "iframe", "object"} & page.names
    assert not {"src", "href", "style"} & page.attributes
    assert "url(" not in html and html.replace('xmlns="http://www.w3.org/2000/svg"', "").count("://") == 0
    assert len(page.of("s0")) == len(page.of("s1")) >= 3
    assert html == render([reported(one.folder), reported(two.folder)])
    assert re.search(r"<th>goodput</th><td>83.0%</td><td>83.0%</td>", html)


def test_the_command_prints_tables_json_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = faulted(tmp_path).folder
    with pytest.raises(SystemExit) as left:
        main(["report", str(run), "--json", "--html", str(tmp_path / "page.html")])
    assert left.value.code == 0
    [found] = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["saves"]["failed"]) == ("done", 77, 1)
    assert found["changes"][0]["steps_lost"] == 3
    assert any("coverage is not proven" in note for note in found["notes"])
    assert (tmp_path / "page.html").read_text().startswith("\n<!doctype html>".lstrip())
    with pytest.raises(SystemExit):
        main(["report", str(run)])
    printed = capsys.readouterr().out
    assert "goodput" in printed and "slow_compute" in printed and "rank 1 on beta" in printed


def test_the_data_of_a_run_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration names folders relative to where the run was started: above its own folder, if not here."""
    run, elsewhere = tmp_path / "project/runs/one", tmp_path / "elsewhere"
    for folder in (run, elsewhere, tmp_path / "project/data/train"):
        folder.mkdir(parents=True)
    (run / "config.yaml").write_text("data: {train: data/train}\n")
    for place in (elsewhere, tmp_path / "project"):
        monkeypatch.chdir(place)
        (found,) = RunFolder(run).training_sets()
        assert Path(found).resolve() == tmp_path / "project/data/train"
    (elsewhere / "data/train").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    (run / "config.yaml").write_text(f"{STARTED_IN}{elsewhere}\ndata: {{train: data/train}}\n")
    assert RunFolder(run).training_sets() == [f"{elsewhere}/data/train"], "that is where it was started"


def test_one_rank_has_no_other_to_be_compared_with_and_that_is_no_problem() -> None:
    drawn = draw(lambda: compute_figure(Story(Path("one"), [])))
    assert drawn.problem is None and drawn.nothing == "no world of two ranks or more has phases"


@pytest.mark.slow
def test_a_real_run_has_a_whole_report(tmp_path: Path, rows: Path) -> None:
    """Its time tiles, all of its figures are drawn, and its commits prove the coverage."""
    succeed(start([config(tmp_path, rows, CLASSIFIER)], num_ranks=2))
    report = report_on(str(tmp_path / "run"))
    assert (report.state, report.step, report.changes) == ("done", report.result["step"], [])
    assert report.seconds == pytest.approx(report.story.ended - report.story.began)
    assert report.spent["steps"] > 0 and report.spent["validation"] > 0 and report.spent["ending"] > 0
    assert report.coverage.proven and not report.coverage.wrong
    assert set(report.phases_s()) == {*PHASES, "hidden"}
    assert report.memory is not None and [one.rank for one in report.memory.ranks] == [0, 1]
    for facts in (one.facts for one in report.memory.ranks):
        taken = facts.parts
        assert taken["weights"] == taken["gradients"] > 0 and taken["optimizer"] == pytest.approx(
            2 * taken["weights"], rel=0.01
        )
        assert facts.peak > facts.program + sum(taken.values()) > facts.program > 0
    assert report.samples_per_s is not None and report.environment()["hosts"]
    page = render([report])
    assert page.count("<svg") >= 8 and "Cannot be drawn" not in page
