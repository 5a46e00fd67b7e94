"""The scaling of runs: known seconds are recovered, and the limiting part is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_train.cli.main import main
from elastic_train.errors import ConfigError
from elastic_train.insight.phases import PHASES
from elastic_train.runs.report import report_on
from elastic_train.runs.scaling import Scaling, scaling
from tests.elastic_train.runs.folders import begin


def written(folder: Path, ranks: int, *, lanes: int = 8, **phases_s: float) -> Path:
    """Write a run on so many ranks, whose steps take these seconds by phase on every rank."""
    run = begin(folder, f"w{ranks}")
    run.config(batch={"global_batch": 64, "micro_batch": 64 // lanes})
    row = [10 * phases_s.get(phase, 0.0) for phase in PHASES]
    row += [10 * phases_s.get("hidden", 0.0), 10 * phases_s.get("sent", 0.0), 0.0]
    first = [[10 * value for value in row]] * ranks  # a first window that is of no use: kernels are chosen
    lines = [(2.0, first), (3.0, [row] * ranks), (4.0, [row] * ranks)]
    extra = [(at, {"op": "phases", "step": int(at), "steps": 10, "seconds": rows}) for at, rows in lines]
    run.world(1, lo=0, steps={1: 2.0}, size=ranks, extra=extra)
    return run.folder


def scaled(*folders: Path) -> Scaling:
    return scaling([report_on(str(folder), with_coverage=False) for folder in folders])


def test_speed_up_and_efficiency_are_of_the_smallest_world(tmp_path: Path) -> None:
    """Twice the ranks, 1.6 times as fast: what is missing is the exchange, and a quarter of it is hidden."""
    found = scaled(
        written(tmp_path, 2, forward=0.2, backward=0.3, exchange=0.125, hidden=0.05, sent=1e6),
        written(tmp_path, 1, forward=0.4, backward=0.6),
    )
    one, two = found.rows
    assert (one.point.ranks, one.speedup, one.efficiency, one.limit) == (1, 1.0, 1.0, None)
    assert (two.point.step_s, two.speedup, two.efficiency) == pytest.approx((0.625, 1.6, 0.8))
    assert two.point.communication_share == pytest.approx(0.2)
    assert (two.limit, two.excess_s["exchange"]) == ("exchange", pytest.approx(0.125))
    assert (remedy := found.remedy()) is not None and remedy.startswith("exchange: the network")
    assert sum(two.excess_s.values()) == pytest.approx(two.point.step_s - 0.5)


def test_lanes_that_do_not_go_evenly_are_what_limits(tmp_path: Path) -> None:
    """Three ranks have 8 lanes: two of them wait a third lane's time for nothing."""
    found = scaled(
        written(tmp_path, 1, forward=0.8), written(tmp_path, 3, forward=0.8 / 3, wait=0.1 * 3 - 0.8 / 3, exchange=0.01)
    )
    assert found.rows[-1].limit == "wait"
    assert "8 lanes do not go evenly into 3 ranks" in str(found.remedy())


def test_what_each_rank_repeats_does_not_scale(tmp_path: Path) -> None:
    found = scaled(written(tmp_path, 1, forward=0.4, optimizer=0.2), written(tmp_path, 4, forward=0.1, optimizer=0.2))
    assert (found.rows[-1].limit, found.rows[-1].excess_s["optimizer"]) == ("optimizer", pytest.approx(0.15))


def test_runs_that_cannot_be_compared_so_are_refused_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run without phases, runs of one size, runs of other batches."""
    short = begin(tmp_path, "short")
    short.world(1, lo=0, steps={1: 2.0})
    one = written(tmp_path, 1, forward=0.4)
    with pytest.raises(ConfigError, match="short has no phases"):
        scaled(one, short.folder)
    with pytest.raises(ConfigError, match="different numbers of ranks"):
        scaled(one, one)
    two = written(tmp_path, 2, forward=0.2)
    (two / "config.yaml").write_text("batch: {global_batch: 32, micro_batch: 8}\n")
    with pytest.raises(SystemExit) as left:
        main(["compare", "--scaling", str(one), str(two), str(tmp_path / "none")])
    assert (left.value.code, "does not exist" in capsys.readouterr().err) == (2, True)
    with pytest.raises(ConfigError, match="global_batch differ: 32, 64"):
        scaled(one, two)


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(written(tmp_path, 1, forward=0.4)), str(written(tmp_path, 2, forward=0.2, exchange=0.1, sent=1e6))]
    with pytest.raises(SystemExit) as left:
        main(["compare", *runs, "--scaling", "--json"])
    assert left.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["ranks"] for row in found["rows"]] == [1, 2]
    assert found["rows"][1]["efficiency"] == pytest.approx(2 / 3)
    with pytest.raises(SystemExit):
        main(["compare", *runs, "--scaling"])
    printed = capsys.readouterr().out
    assert "what limits 2 ranks: exchange" in printed
