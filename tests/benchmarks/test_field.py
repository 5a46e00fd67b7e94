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


@pytest.mark.heavy
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


NO_KILLS = '{"kills": {"8": []}, "etcd": {}, "machine": {"date": "", "cores": 2, "torch": ""}}'


@pytest.mark.parametrize("text", ["", "no JSON", '{"by_ranks": {}}', NO_KILLS])
def test_a_file_without_measured_kills_is_refused(text: str, tmp_path: Path) -> None:
    """With its name."""
    path = tmp_path / "parts.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"parts\.json"):
        read(path)


def parts_file(path: Path, kills: dict[str, list[dict[str, float]]], etcd: dict[int, float]) -> Path:
    """Write what `benchmarks.scale` would have measured on two cores."""
    machine = {"date": "2026-01-01", "cores": 2, "torch": "2"}
    loads = {str(ranks): {"etcd_s": seconds} for ranks, seconds in etcd.items()}
    path.write_text(json.dumps({"kills": kills, "etcd": loads, "machine": machine}))
    return path


def kill(form: float, cpu: float, busiest: float) -> dict[str, float]:
    return {"detect": 0.5, "form": form, "restore": 0.0, "step": -1.0, "cpu": cpu, "busiest": busiest}


def test_ranks_of_the_field_do_not_share_cores(tmp_path: Path) -> None:
    """What all survivors computed on two cores is no latency; the busiest rank's seconds and etcd's grow."""
    kills = {"8": [kill(0.25, 0.1, 0.12)], "16": [kill(0.65, 0.1, 0.16)]}
    parts = read(parts_file(tmp_path / "parts.json", kills, {8: 0.108, 16: 0.116}))
    chance = random.Random(1)
    assert parts.measured(["detect", "form", "step"], chance) == pytest.approx(1.15)
    # Latency: 0.75 less 4 survivors' 0.1 on two cores, and 1.15 less 12 survivors' 0.1 on two cores.
    assert {round(kill.latency_s(["detect", "form"]), 6) for kill in parts.kills} == {0.55}
    expected = 0.55 + (0.08 + 0.005 * 1000) + 0.001 * 1000 / 4
    assert parts.extrapolated(["detect", "form"], 1000, 4, chance) == pytest.approx(expected)


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
