"""A report shows the memory of ranks, and the ranks that ran out of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_train.cli.main import main
from elastic_train.insight.phases import FOLDER
from elastic_train.runs import memory as memories
from elastic_train.runs.memory import memory_of, ran_out_in
from elastic_train.runs.page import render
from elastic_train.runs.report import report_on
from tests.elastic_train.runs.folders import T0, Written, begin, faulted, memory


def said(run: Written, term: int, rank: int, *lines: dict[str, object]) -> None:
    """Let a rank say something of its memory at the end of its history of a term."""
    name = "a" * 12 if rank == 0 else "b" * 12
    found = [{"t": T0 + 99.0, "term": term, "rank": rank, **line} for line in lines]
    run.write(f"history/{term:08d}-{rank:05d}-{name}.jsonl", found)


def measured(folder: Path) -> Written:
    run = faulted(folder)
    said(run, 1, 0, memory(20, 9_000_000))
    said(run, 2, 0, memory(18, 500, sums=0), memory(77, 2_000_000, sums=700_000, optimizer=0))
    said(run, 2, 1, memory(68, 3_000_000))
    return run


def test_the_last_lines_of_the_newest_world_count(tmp_path: Path) -> None:
    """Each rank's own; a history that was shortened, torn or is of an older version has what it has."""
    run = measured(tmp_path)
    found = memory_of(run.folder)
    assert found is not None and (found.term, found.most) == (2, 3_000_000)
    assert [(one.rank, one.step, one.facts.peak) for one in found.ranks] == [(0, 77, 2_000_000), (1, 68, 3_000_000)]
    assert found.ranks[0].facts.rest == 2_000_000 - 50 - 100 - 700_000
    run.world(3, lo=77, cause="lost", steps={78: 100.0}, restored=99.0, size=1)
    said(run, 3, 0, {"op": "memory", "step": 78, "peak": "much"})
    assert memory_of(run.folder) == found, "a world that does not say counts for nothing"
    assert memory_of(begin(tmp_path, "other").folder) is None


def test_only_the_ends_of_histories_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = measured(tmp_path)
    said(run, 2, 1, *[{"op": "step", "step": step} for step in range(80)])
    monkeypatch.setattr(memories, "TAIL_BYTES", 2000)
    found = memory_of(run.folder)
    assert found is not None and [one.rank for one in found.ranks] == [0]


def test_tables_page_and_json_show_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kind of memory that no rank uses has no column."""
    run = str(measured(tmp_path).folder)
    with pytest.raises(SystemExit):
        main(["report", run])
    text = capsys.readouterr().out
    assert "memory of ranks" in text and "memory of a rank, at most" in text
    head = next(line for line in text.splitlines() if line.split()[:2] == ["memory", "on"])
    assert head.split() == ["memory", "on", "peak", "weights", "sums", "program", "rest"]
    rows = [line.split() for line in text.splitlines() if line.lstrip().startswith("rank ")]
    assert rows[0][:5] == ["rank", "0", "alpha", "2", "MB"] and rows[1][:5] == ["rank", "1", "beta", "3", "MB"]
    page = render([report_on(run, with_coverage=False)])
    assert "Memory by rank" in page and "<th>rank 1</th><td>beta</td><td>3 MB</td>" in page
    with pytest.raises(SystemExit):
        main(["report", run, "--json"])
    [found] = json.loads(capsys.readouterr().out)
    assert found["memory"]["most"] == 3_000_000 and found["ran_out_of_memory"] == []
    first = found["memory"]["ranks"][0]
    assert (first["rank"], first["on"], first["parts"]["sums"], first["rest"]) == (0, "alpha", 700_000, 1_299_850)


def test_a_gpu_has_what_its_allocator_reserved_and_what_its_host_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = faulted(tmp_path)
    said(run, 2, 0, memory(77, 1000, "cuda:0"))
    with pytest.raises(SystemExit):
        main(["report", str(run.folder)])
    text = capsys.readouterr().out
    head = next(line for line in text.splitlines() if line.split()[:2] == ["memory", "on"])
    assert head.split()[2:] == ["peak", "weights", "rest", "reserved", "host", "process"]


def test_a_plan_is_set_beside_what_ranks_have_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the same names; what it says of activations beside the rest."""
    run, plan = str(measured(tmp_path).folder), tmp_path / "plan.json"
    parts = {"weights": 1e6, "sums": 0.0, "exchange": 2e6, "activations": 5e6, "host": 0.0, "total": 8e6}
    plan.write_text(json.dumps({"own": {"memory_bytes": parts}}))
    with pytest.raises(SystemExit):
        main(["report", run, "--plan", str(plan)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    head = next(line for line in lines if line[:2] == ["memory", "on"])
    assert head == ["memory", "on", "peak", "weights", "sums", "exchange", "program", "rest"]
    [row] = [" ".join(line) for line in lines if line[:1] == ["plan"]]
    assert row == "plan – 8 MB 1 MB 0 kB 2 MB – 5 MB"
    with pytest.raises(SystemExit):
        main(["report", run, "--plan", str(plan), "--json"])
    assert json.loads(capsys.readouterr().out)[0]["planned_memory"] == parts
    for content in ("{", "[]", '{"own": {"memory_bytes": null}}', None):
        plan.unlink() if content is None else plan.write_text(content)
        with pytest.raises(SystemExit) as left:
            main(["report", run, "--plan", str(plan)])
        assert left.value.code == 2 and "is not a plan (" in capsys.readouterr().err


def test_who_ran_out_of_memory_is_among_the_notes(tmp_path: Path) -> None:
    """The newest three; a file that is no snapshot is passed over."""
    run = faulted(tmp_path)
    (run.folder / FOLDER).mkdir()
    for term in range(1, 6):
        known = (
            {"term": term, "step": term + 10} if term < 5 else {"term": 0, "step": None}
        )  # outside of worlds it is 0
        fields = {**known, "rank": 1, "host": "beta", "lane": 3, "t": 100.0 + term}
        (run.folder / FOLDER / f"{known['term']:08d}-00001.json").write_text(json.dumps(fields))
    for name, text in (("00000006-00000", "{"), ("00000007-00000", "[]"), ("00000008-00000", '{"term": 8}')):
        (run.folder / FOLDER / f"{name}.json").write_text(text)
    assert [(one.term, one.step, one.lane) for one in ran_out_in(run.folder)][-2:] == [(4, 14, 3), (0, None, 3)]
    report = report_on(str(run.folder), with_coverage=False)
    notes = [note for note in report.notes if "ran out of memory" in note]
    assert len(notes) == 3 and len(report.ran_out) == 5
    assert notes[-1].startswith("rank 1 on beta ran out of memory before its first world (term 0): ")
    assert notes[-2].endswith("00000004-00001.json says what took it") and "in step 14" in notes[-2]
