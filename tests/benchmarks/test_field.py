"""The comparison with other systems: its table is up to date, and its draws follow the closed forms."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import mean

import pytest

from benchmarks.field.__main__ import BEGIN, END, HERE, Field, section
from benchmarks.field.lives import Fleet, Recovery, live
from benchmarks.field.parts import Line, fit, read
from elastic_train.errors import ConfigError
from tests.conftest import ROOT


def test_the_table_in_the_documentation_is_what_the_command_writes() -> None:
    """From the committed parts and published figures."""
    text = (ROOT / "docs/benchmarks.md").read_text().partition(BEGIN)[2].partition(END)[0]
    assert text == f"\n{section(Field(read(HERE / 'parts.json')))}\n"


def test_every_published_figure_has_an_address() -> None:
    """Of systems and of failure rates."""
    field = Field(read(HERE / "parts.json"))
    assert all(each["source"].startswith("https://") for each in [*field.others, *field.rates])


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(8, 1.0), (16, 2.0), (32, 4.0)], Line(0.0, 0.125)),
        ([(8, 3.0), (16, 2.0), (24, 1.0)], Line(2.0, 0.0)),
        ([(10, 0.0), (20, 2.0)], Line(0.0, 0.08)),
    ],
    ids=["grows", "shrinks", "would begin below zero"],
)
def test_a_fit_has_no_negative_coefficient(points: list[tuple[int, float]], line: Line) -> None:
    """Extrapolated seconds can neither fall with the ranks nor begin below zero."""
    found = fit(points)
    assert (found.a, found.b) == pytest.approx((line.a, line.b), abs=1e-9)


@pytest.mark.parametrize("text", ["", "no JSON", '{"by_ranks": {}}', '{"kills": {"8": []}, "machine": {}}'])
def test_a_file_without_measured_kills_is_refused(text: str, tmp_path: Path) -> None:
    """With its name."""
    path = tmp_path / "parts.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"parts\.json"):
        read(path)


def test_parts_are_drawn_around_the_fit(tmp_path: Path) -> None:
    """Factors of measured recoveries apply to the extrapolated seconds."""
    kills = {str(ranks): [{"detect": 0.0, "form": part * ranks, "restore": 0.0, "step": 0.0} for part in (0.1, 0.3)]
             for ranks in (8, 16)}  # fmt: skip
    path = tmp_path / "parts.json"
    path.write_text(json.dumps({"kills": kills, "machine": {"date": "2026-01-01", "cores": 2, "torch": "2"}}))
    chance = random.Random(1)
    drawn = {round(read(path).draw(["form"], 1000, chance), 6) for _ in range(20)}
    assert drawn == {100.0, 300.0}


def test_a_failure_costs_its_recovery_and_half_a_step() -> None:
    """At a mean time between failures that is long beside both."""
    life = live(Recovery(lambda _: 20.0, lost_step_s=8.0), Fleet(36_000.0), 10_000.0, random.Random(1))
    assert mean(life.recovery_s) == pytest.approx(24.0, rel=0.02)
    assert 1 - life.goodput == pytest.approx(24.0 / 36_024.0, rel=0.03)


def test_a_replica_group_is_idle_while_more_nodes_are_away_than_stand_by() -> None:
    """Without standbys, one of ten groups for the repair; with enough of them, none."""
    repair_s, mtbf_s = 3600.0, 36_000.0
    recovery = Recovery(lambda _: 0.0, lost_step_s=0.0)
    alone, spared = (
        live(recovery, Fleet(mtbf_s, 10, standby, repair_s), 10_000.0, random.Random(1)).goodput for standby in (0, 10)
    )
    assert spared == pytest.approx(1.0)
    assert 1 - alone == pytest.approx(repair_s / mtbf_s / 10, rel=0.03)
