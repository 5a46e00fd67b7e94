"""Nodes whose clocks differ by seconds: what is judged by times is judged on one clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.judge.checker import judge
from chaos.judge.evidence.clocks import offsets_of
from chaos.judge.evidence.run_files import Line, collect
from chaos.planted.damage_commits import older_commit
from chaos.planted.edits import edit, forge
from tests.chaos.recorded import record

AHEAD_S = 5.0


@pytest.fixture
def skewed(tmp_path: Path) -> Path:
    """A good run of whose hosts one has a clock that is ahead: that of the first two worlds' rank 0."""
    folder = record(tmp_path / "run")
    edit(folder / "faulted", _host)
    return folder


def _host(line: Line) -> Line:
    if "rank" not in line:
        return line
    host = f"h{(int(str(line['rank'])) + int(str(line['term']))) % 2}"
    return {**line, "host": host, "boot": host, "born": 1} if line["op"] == "form" else line


def skew(folder: Path, seconds: float) -> None:
    """Have the clock of h1 be ahead in all that it stamps."""

    def moved(line: Line) -> Line:
        if "rank" not in line or (int(str(line["rank"])) + int(str(line["term"]))) % 2 != 1:
            return line
        return {key: value + seconds if key in ("t", "joined_at") else value for key, value in line.items()}  # type: ignore[operator]

    edit(folder / "faulted", moved)
    forge(
        folder / "faulted",
        lambda record: {**record, "created_at": float(str(record["created_at"])) + _ahead(record, seconds)},
    )


def _ahead(record: Line, seconds: float) -> float:
    return seconds if int(str(record["term"])) % 2 == 1 else 0.0


def truths(folder: Path) -> dict[str, str]:
    findings = judge(collect(folder / "faulted"), collect(folder / "reference"))
    return {finding.invariant: finding.truth for finding in findings}


@pytest.mark.parametrize("seconds", [AHEAD_S, -AHEAD_S, 20.0])
def test_a_clock_that_is_ahead_is_seen_and_raises_no_alarm(skewed: Path, seconds: float) -> None:
    assert offsets_of(collect(skewed / "faulted").processes) == {}
    skew(skewed, seconds)
    assert {name: truth for name, truth in truths(skewed).items() if truth != "true"} == {}


@pytest.mark.parametrize("seconds", [AHEAD_S, -20.0])
def test_durability_is_not_blind_where_clocks_differ(skewed: Path, seconds: float) -> None:
    """A term that continues an older commit is found, though by its clock the newest had not been published by then."""
    older_commit(skewed / "faulted")
    skew(skewed, seconds)
    assert truths(skewed)["durability"] == "false"


def test_small_differences_are_left_alone(skewed: Path) -> None:
    before = collect(skewed / "faulted").processes
    skew(skewed, 0.01)
    assert offsets_of(collect(skewed / "faulted").processes) == {}
    assert len(before) == len(collect(skewed / "faulted").processes)
