"""Nodes whose clocks differ by seconds: judgements based on times use one clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chaos.judge.checker import judge
from chaos.judge.evidence.clocks import offsets_of, on_one_clock
from chaos.judge.evidence.run_files import Line, collect
from chaos.planted.damage_commits import older_commit
from chaos.planted.edits import edit, forge
from tests.chaos.recorded import record

AHEAD_S = 5.0


@pytest.fixture
def skewed(tmp_path: Path) -> Path:
    """A good run in which the clock of one host, that of the first two worlds' rank 0, is ahead."""
    folder = record(tmp_path / "run")
    edit(folder / "faulted", _host)
    return folder


def _host(line: Line) -> Line:
    if "rank" not in line:
        return line
    host = f"h{(int(str(line['rank'])) + int(str(line['term']))) % 2}"
    return {**line, "host": host, "boot": host, "born": 1} if line["op"] == "form" else line


def skew(folder: Path, seconds: float) -> None:
    """Set the clock of h1 ahead in all of its timestamps."""

    def moved(line: Line) -> Line:
        if "rank" not in line or (int(str(line["rank"])) + int(str(line["term"]))) % 2 != 1:
            return line
        return {key: value + seconds if key in ("t", "joined_at") else value for key, value in line.items()}  # type: ignore[operator]

    edit(folder / "faulted", moved)
    forge(
        folder / "faulted",
        lambda record: {**record, "created_at": float(str(record["created_at"])) + _ahead(record, seconds)},
    )
    for path in (folder / "faulted" / "metrics").iterdir():  # timestamps of rank 0
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**x, "t": x["t"] + _ahead(x, seconds)}) + "\n" for x in lines))


def _ahead(record: Line, seconds: float) -> float:
    return seconds if int(str(record["term"])) % 2 == 1 else 0.0


def truths(folder: Path) -> dict[str, str]:
    findings = judge(collect(folder / "faulted"), collect(folder / "reference"))
    return {finding.invariant: finding.truth for finding in findings}


@pytest.mark.heavy
@pytest.mark.parametrize("seconds", [AHEAD_S, -AHEAD_S, 20.0])
def test_a_clock_that_is_ahead_is_seen_and_raises_no_alarm(skewed: Path, seconds: float) -> None:
    assert offsets_of(collect(skewed / "faulted").processes) == {}
    skew(skewed, seconds)
    assert {name: truth for name, truth in truths(skewed).items() if truth != "true"} == {}


@pytest.mark.parametrize("seconds", [AHEAD_S, -20.0])
def test_durability_is_not_blind_where_clocks_differ(skewed: Path, seconds: float) -> None:
    """A term that continues an older commit is found, though by its clock the newest was not yet published."""
    older_commit(skewed / "faulted")
    skew(skewed, seconds)
    assert truths(skewed)["durability"] == "false"


def _world(term: int, at: float, ahead: dict[str, float], *steps: int) -> list[Line]:
    """Return a world of one process per host, with a second per step, timestamped by clocks ahead by `ahead`."""
    found: list[Line] = []
    for rank, (host, ahead_s) in enumerate(ahead.items()):
        found.append({"op": "form", "t": at + ahead_s, "term": term, "rank": rank, "host": host})
        found += (
            {"op": "step", "t": at + after + ahead_s, "term": term, "rank": rank, "step": step}
            for after, step in enumerate(steps, 1)
        )
    return found


@pytest.mark.parametrize(("ahead", "after_s"), [("a", 2.0), ("b", 2.0), ("a", 0.2), ("b", 0.2)])
@pytest.mark.parametrize("steps", [(), (3,)])
def test_a_fault_tells_whose_clock_is_ahead_by_the_term_that_had_not_formed(
    ahead: str, after_s: float, steps: tuple[int, ...]
) -> None:
    """The job ends with the next world; by the other clock that had formed before the fault that ended the last one."""
    clocks = {"a": 0.0, "b": 0.0, ahead: -3.0}
    fault: Line = {"op": "fault", "t": 10.0, "term": 1, "seen_step": 2}
    lines = [*_world(1, 7.0, clocks, 1, 2), *_world(2, 10.0 + after_s, clocks, *steps), fault]
    assert offsets_of([lines]) == {ahead: -3.0}


def test_a_fault_has_seen_that_its_term_had_formed() -> None:
    """Most clocks are ahead, by different seconds, and the only fault comes before the first step."""
    clocks = {"a": 6.0, "b": 16.0, "c": 0.0, "d": 9.0}
    fault: Line = {"op": "fault", "t": 7.2, "term": 1, "seen_step": 0}
    ahead = {host: seconds for host, seconds in clocks.items() if seconds}
    assert offsets_of([[*_world(1, 7.0, clocks, 1, 2), fault]]) == ahead


def test_a_fault_may_have_seen_its_step_in_an_older_term() -> None:
    """The newer one restored an older state, and applies the step again after the fault."""
    clocks = {"a": 0.0, "b": -6.0, "c": -4.0}
    fault: Line = {"op": "fault", "t": 20.5, "term": 2, "seen_step": 4}
    lines = [*_world(1, 5.0, clocks, 1, 2, 3, 4), *_world(2, 20.0, clocks, 2, 3, 4), fault]
    assert offsets_of([lines]) == {"b": -6.0, "c": -4.0}


@pytest.mark.parametrize("ahead_s", [12.0, -12.0])
def test_a_host_that_met_nobody_is_matched_by_the_end_of_its_node(ahead_s: float) -> None:
    """It trained alone after the others had ended; a fault came between, and its node was started twice."""
    alone = _world(2, 30.0, {"c": ahead_s}, 5, 6)
    alone[0]["pid"] = 3
    nodes: list[Line] = [
        {"op": "exit", "t": 9.0, "node": 2},
        {"op": "node", "t": 29.0, "node": 2, "pids": [3]},
        {"op": "fault", "t": 29.5, "term": 1, "seen_step": 4},
        {"op": "exit", "t": 32.4, "node": 2},
    ]
    found = offsets_of([[*_world(1, 5.0, {"a": 0.0, "b": 0.0}, 4), *alone, *nodes]])
    assert found == {"c": pytest.approx(ahead_s, abs=0.7)}


def test_a_seal_is_stamped_by_the_leaders_clock() -> None:
    """All members of a world record when it was sealed."""
    world = _world(1, 20.0, {"a": -8.0, "b": 0.0, "c": 5.0}, 1, 2, 3)
    lines = [{**line, "sealed_at": 11.5} if line["op"] == "form" else line for line in world]
    (shown,) = on_one_clock([lines], offsets_of([lines]))
    formed = [line for line in shown if line["op"] == "form"]
    assert [(line["t"], line["sealed_at"]) for line in formed] == [(20.0, 19.5)] * 3


def test_clocks_that_no_end_contradicts_are_those_of_most_hosts() -> None:
    clocks = {"a": -8.0, "b": 0.0, "c": -12.0, "d": 0.0}
    assert offsets_of([_world(1, 20.0, clocks, 1, 2, 3)]) == {"a": -8.0, "c": -12.0}


def test_hosts_that_never_met_have_clocks_of_their_own() -> None:
    """A twin's world preceded the job: that all of its clocks agree says nothing about the other hosts."""
    lines = [*_world(1, 5.0, {"a": 0.0, "b": 0.0, "c": 0.0}, 1), *_world(2, 20.0, {"d": 0.0, "e": -6.0, "f": 0.0}, 1)]
    assert offsets_of([lines]) == {"e": -6.0}


def test_small_differences_are_left_alone(skewed: Path) -> None:
    before = collect(skewed / "faulted").processes
    skew(skewed, 0.01)
    assert offsets_of(collect(skewed / "faulted").processes) == {}
    assert len(before) == len(collect(skewed / "faulted").processes)


def test_a_host_that_was_frozen_in_most_of_its_few_steps_has_no_wrong_clock() -> None:
    """It wrote two of three steps late, but wrote on time in the formation of its worlds."""
    lines = [line for term in (1, 2, 3) for line in _world(term, 100.0 * term, {"a": 0.0, "b": 0.0}, term)]
    for line in lines:
        if line["op"] == "step" and line["rank"] == 1 and line["term"] != 1:
            line["t"] = float(str(line["t"])) + 7.0 * int(str(line["term"]))
    assert offsets_of([lines]) == {}
