"""Samples that crash the process that computes them are found with trial processes, which do crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.config.schema import Config
from elastic_train.core.accounting import CoverageSums, expected_sums
from elastic_train.core.arrays import group_of
from elastic_train.job import crash_isolation
from elastic_train.job.crash_isolation import find_deadly
from elastic_train.job.plan import Plan, make_plan
from elastic_train.world.quarantine import _sample_hole
from tests.conftest import run_source, write_rows
from tests.elastic_train.training.jobs import PARAMS

pytestmark = pytest.mark.slow
LIMIT_S = 240.0


def plan_of(rows: Path, ids: list[int], how: str = "kill") -> Plan:
    task = {"path": "tests.tasks:Poisoned", "params": {**PARAMS, "ids": ids, "how": how}}
    data = {"train": str(rows / "train"), "too_long": "truncate"}
    return make_plan(
        Config.model_validate({"data": data, "task": task, "batch": {"global_batch": 24, "micro_batch": 6}})
    )


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let the program be a fork of one that has imported the trainer; return its lines, by run."""
    said = list[list[str]]()
    source = "import runpy; runpy.run_module('elastic_train.job.crash_isolation', run_name='__main__')"

    def search(folder: Path, limit_s: float) -> list[str]:
        said.append(run_source(source, str(folder), timeout_s=limit_s).stdout.splitlines())
        return said[-1]

    monkeypatch.setattr(crash_isolation, "_search_beside", search)
    return said


def samples_of(plan: Plan, step: int, lane: int) -> list[int]:
    cursor = plan.order.cursor_at(step, plan.micro_batch)
    ids: list[int] = plan.order.epoch(cursor.epoch).ids(lane, cursor.offset, cursor.offset + plan.micro_batch).tolist()
    return ids


@pytest.mark.usefixtures("forked")
def test_each_deadly_sample_of_a_step_is_found_whatever_lane_it_is_in(rows: Path) -> None:
    """Two in one lane and one in another, and none that is only in the same lane."""
    healthy = plan_of(rows, [])
    deadly = [samples_of(healthy, 5, 1)[2], samples_of(healthy, 5, 1)[4], samples_of(healthy, 5, 3)[0]]
    plan = plan_of(rows, deadly)
    found = find_deadly(plan, plan.build_state(), 5, range(4), (), LIMIT_S)
    assert found == dict.fromkeys(sorted(deadly, key=deadly.index), "ends its process with SIGSEGV")


def test_a_healthy_step_is_tried_once(rows: Path, forked: list[list[str]]) -> None:
    plan = plan_of(rows, [])
    assert find_deadly(plan, plan.build_state(), 5, range(4), (), LIMIT_S) == {}
    assert forked == [[]]


def test_data_that_is_away_makes_no_sample_deadly(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "train", 60)
    config = {"data": {"train": str(data), "too_long": "truncate"}, "batch": {"global_batch": 24, "micro_batch": 6}}
    task = {"path": "tests.tasks:Poisoned", "params": {**PARAMS, "ids": [], "how": "kill"}}
    plan = make_plan(Config.model_validate({**config, "task": task}))
    state, unit = plan.build_state(), crash_isolation.Unit(0, tuple(samples_of(plan, 0, 0)))
    data.rename(tmp_path / "away")
    crash_isolation._compute(plan, state, 0, unit, ())


def test_a_search_that_hangs_ends_in_time_with_what_it_has_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho found\nexec sleep 300\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    assert crash_isolation._search_beside(tmp_path, 1.0) == ["found"]


def test_a_sample_that_is_left_out_counts_as_a_hole_of_one(rows: Path) -> None:
    """The closed form of the sums excludes it from its epoch on, but includes it in the epoch that applied it."""
    plan = plan_of(rows, [])
    num = plan.manifest.num_rows
    sample = samples_of(plan, 5, 1)[2]
    hole = _sample_hole(plan, 5, sample, "gone")
    assert (hole.lo, hole.hi, hole.group) == (sample, sample + 1, group_of(plan.order.group_first_id, sample))
    whole = CoverageSums.of_all(num)
    assert expected_sums(whole, [hole], 2) == whole * 2 - CoverageSums.of_range(sample, sample + 1) * 2
    later = _sample_hole(plan, 9, sample, "gone")  # this epoch has already applied it
    assert expected_sums(whole, [later], 2) == whole * 2 - CoverageSums.of_range(sample, sample + 1)
    rules = plan.feed._rules([hole])
    assert (rules.holes, rules.left_out) == ((), ((sample, sample + 1, 5),))
