"""The live view: what a run's files say of this moment, whatever the length of its histories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from elastic_train.cli.main import main
from elastic_train.cli.runs.top import MOST_RANKS, frame
from elastic_train.runs import glance as glances
from elastic_train.runs.glance import look
from tests.elastic_train.runs.folders import T0, begin, faulted, memory, row


def drawn(run: Path, now: float = T0 + 100.0) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(frame(look(run), now))
    return captured.get()


def test_a_frame_shows_the_newest_world(tmp_path: Path) -> None:
    """Its step and rate, each node's and each rank's phases, the slow rank by name, and what happened."""
    run = faulted(tmp_path).folder
    found = look(run)
    assert (found.status, found.term, found.size, found.step, found.step_s) == ("done", 2, 2, 77, 1.0)
    assert (found.samples_per_s, found.num_worlds, found.waiting) == (64.0, 2, None)
    assert found.phase_ms(1)["forward"] == pytest.approx(25_000 / 60)
    text = drawn(run)
    one_line = " ".join(text.split())  # where the path of a folder is long, a line ends anywhere
    assert "run: done" in one_line and "7.5 s ago" in one_line
    assert [line.split()[0] for line in text.splitlines() if " ms " in line] == ["alpha", "beta"]
    assert "1.43x" in text and "0.57x" in text
    assert "EVENT slow_compute rank 1 on beta: 0.5 s against 0.2, since step 30" in text
    assert "term 1: 2 ranks (start)" in text and "term 2: 2 ranks (lost)" in text and "end: done after step 77" in text


def test_only_the_end_of_a_long_history_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line of what is read is torn, and the commit before it is not seen."""
    run = begin(tmp_path)
    run.world(
        1,
        lo=0,
        steps={step: 1.0 + step for step in range(1, 200)},
        extra=[(2.5, {"op": "commit", "step": 1, "seconds": 1.0, "stall_s": 0.0})],
    )
    assert look(run.folder).commit is not None
    monkeypatch.setattr(glances, "TAIL_BYTES", 2000)
    found = look(run.folder)
    assert (found.step, found.step_s, found.commit, found.hosts) == (199, 1.0, None, {0: "alpha", 1: "beta"})


def test_of_few_ranks_the_memory_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most that each has had; a dash for one that has not said so. Of many ranks as many files would be read."""
    run = faulted(tmp_path)
    run.write(f"history/00000002-00001-{'b' * 12}.jsonl", [{"t": T0 + 92.0, **memory(77, 3_000_000)}])
    assert look(run.folder).memory == {1: 3_000_000}
    rows = [line.split() for line in drawn(run.folder).splitlines() if "x " in line and line.split()[0] in "01"]
    assert [row[-1] for row in rows] == ["-", "MB"] and rows[1][-2] == "3"
    monkeypatch.setattr(glances, "MOST_LOOKED_AT", 1)
    assert look(run.folder).memory == {} and " memory" not in drawn(run.folder)


def test_a_run_without_a_world_says_why(tmp_path: Path) -> None:
    """Ranks that did not meet leave a file of their own; what is older than the last line of a world is over."""
    run = begin(tmp_path)
    assert "no world yet" in drawn(run.folder)
    run.write(
        "history/unformed-alpha-1-2-3.jsonl", [{"op": "unformed", "t": T0 + 10.0, "term": 1, "why": "rank 1 is late"}]
    )
    assert "no world forms: rank 1 is late" in drawn(run.folder)
    run.world(1, lo=0, steps={1: 20.0})
    assert "late" not in drawn(run.folder)
    assert "nodes: alpha, beta; the phases of steps are not written yet" in drawn(run.folder)


def test_a_run_that_writes_no_lines_may_have_been_killed(tmp_path: Path) -> None:
    run = begin(tmp_path)
    run.world(1, lo=0, steps={1: 2.0})
    glance = look(run.folder)
    assert glance.last_at is not None
    for quiet_s, said in ((59.0, "training"), (300.0, "killed, or in a long step: its last line is from 5.0 min ago")):
        assert said in " ".join(drawn(run.folder, glance.last_at + quiet_s).split())


def test_a_result_of_an_older_term_says_nothing_of_a_run_that_goes_on(tmp_path: Path) -> None:
    run = begin(tmp_path)
    run.world(3, lo=0, steps={1: 2.0})
    result = run.folder / "result.json"
    for term, status in ((2, None), (3, "preempted")):
        result.write_text(json.dumps({"status": "preempted", "term": term}))
        assert look(run.folder).status == status
    result.write_text("{")
    assert look(run.folder).status is None


def test_of_many_ranks_the_slowest_are_shown(tmp_path: Path) -> None:
    """A thousand ranks on one screen, the slow one among them, neighbours on a node as a range."""
    run = begin(tmp_path)
    rows = [row(3.0 if rank == 777 else 1.0) for rank in range(1000)]
    run.world(1, lo=0, steps={1: 2.0}, size=1, extra=[(2.1, {"op": "phases", "step": 1, "steps": 1, "seconds": rows})])
    text = drawn(run.folder)
    assert [line.split()[0] for line in text.splitlines() if "x " in line and "." in line].count("777") == 1
    assert f"milliseconds of a step of the {MOST_RANKS} slowest of 1000" in text
    assert "1–999" in text


def test_the_command_prints_one_frame_where_nobody_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(faulted(tmp_path).folder)
    for arguments in (["--once"], []):
        with pytest.raises(SystemExit) as left:
            main(["top", run, *arguments])
        assert (left.value.code, "samples/s" in capsys.readouterr().out) == (0, True)
    with pytest.raises(SystemExit):
        main(["top", run, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["ranks"][1]["host"]) == (77, "beta")
    for arguments in ([str(tmp_path)], [run, "--every", "0"], [run, "--every", "inf"]):
        with pytest.raises(SystemExit) as left:
            main(["top", *arguments])
        assert left.value.code == 2
