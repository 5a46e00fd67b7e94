"""A storm: jobs over all layouts until there were enough faults, a line for each, and no job twice; and its end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest

from chaos.errors import RunError, ScenarioError
from chaos.judge.verdict import Verdict
from chaos.real.leftovers import on_first_signal
from chaos.real.storm import IN_VAIN, Storm, Tally, open_storm, run_storm
from chaos.scenario.layouts import LAYOUTS
from chaos.scenario.model import Scenario
from elastic_train.config.sources import as_argument, load
from elastic_train.errors import ConfigError

Ran = list[tuple[str, int]]


def storm(folder: Path, faults: int = 30, layouts: tuple[str, ...] = ("whole", "tensor")) -> Storm:
    return Storm(faults, 10, 5, layouts, folder)


def executing(ran: Ran, **truths: str) -> Callable[[Scenario, int, Path, str], Verdict]:
    """Return a stand-in that has ten faults a job; in the layouts of `truths` an invariant has this truth."""

    def execute(scenario: Scenario, seed: int, folder: Path, replay: str) -> Verdict:
        name = scenario.name.removeprefix("storm-")
        ran.append((name, seed))
        folder.mkdir(parents=True)
        truth = truths.get(name, "true")
        if truth == "stuck":
            raise RunError("it is stuck")
        findings = [SimpleNamespace(invariant="hash", truth="true" if truth == "stopped" else truth)]
        run = SimpleNamespace(has=lambda op: truth == "stopped")
        fields = {"faults_by_kind": {"kill_worker": 6, "stop": 4}, "weights_sha256": "abc"}
        verdict: Any = SimpleNamespace(
            findings=findings, run=run, fields=fields, is_valid=truth in ("true", "stopped"), replay=replay
        )
        return cast(Verdict, verdict)

    return execute


def test_layouts_take_turns_until_there_were_enough_faults(tmp_path: Path) -> None:
    ran: Ran = []
    said: list[str] = []
    tally = run_storm(storm(tmp_path), executing(ran), said.append)
    assert ran == [("whole", 5), ("tensor", 6), ("whole", 7)]
    assert (tally.num_faults, tally.failed, len(said)) == (30, [], 3)
    fields = tally.fields()
    assert (fields["valid"], fields["faults_by_layout"]) == (True, {"whole": 20, "tensor": 10})
    assert fields["faults_by_kind"] == {"kill_worker": 18, "stop": 12}
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.jsonl"], "valid jobs leave a line"


def test_an_interrupted_storm_continues_with_what_its_ledger_lacks(tmp_path: Path) -> None:
    """Also if the last line was cut; a storm of other options does not count its jobs."""
    ran: Ran = []
    run_storm(storm(tmp_path, faults=20), executing(ran), lambda _: None)
    ledger = tmp_path / "ledger.jsonl"
    first, second = ledger.read_text().splitlines(keepends=True)
    ledger.write_text(first + second[:20])
    del ran[:]
    assert run_storm(storm(tmp_path), executing(ran), lambda _: None).num_faults == 30
    assert ran == [("tensor", 6), ("whole", 7)]
    del ran[:]
    run_storm(storm(tmp_path, faults=10, layouts=("pipeline",)), executing(ran), lambda _: None)
    assert ran == [("pipeline", 5)]


def test_ctrl_c_ends_the_job_and_then_the_storm(tmp_path: Path) -> None:
    ran: Ran = []
    tally = run_storm(storm(tmp_path), executing(ran, whole="stopped"), lambda _: None)
    assert len(ran) == 1 and not tally.failed
    assert run_storm(storm(tmp_path), executing(ran), lambda _: None).num_faults == 30


@pytest.mark.parametrize("truth", ["false", "unknown", "stuck"])
def test_a_job_that_is_not_valid_is_kept_and_the_storm_goes_on(tmp_path: Path, truth: str) -> None:
    tally = run_storm(storm(tmp_path), executing([], tensor=truth), lambda _: None)
    (failed,) = tally.failed[:1]
    assert (failed.layout, failed.seed) == ("tensor", 6) and (tmp_path / "00001-tensor").is_dir()
    assert "NOT VALID" in str(failed) and tally.num_faults == 30
    assert json.loads(json.dumps(tally.fields()))["valid"] is False
    again = open_storm(tmp_path / "ledger.jsonl")
    again.close()
    assert Tally(again.entries).fields()["failed"] == tally.fields()["failed"]


def test_a_storm_whose_jobs_all_fail_before_a_fault_ends(tmp_path: Path) -> None:
    """It would go on for ever, as nothing brings it nearer to its number of faults."""
    said: list[str] = []
    ran: Ran = []
    tally = run_storm(storm(tmp_path), executing(ran, whole="stuck", tensor="stuck"), said.append)
    assert len(ran) == len(tally.failed) == IN_VAIN
    assert said[-1] == f"the last {IN_VAIN} jobs ended before a fault: no more are begun"


@pytest.mark.parametrize("error", [ScenarioError("no kind is left"), ConfigError("configs/soak.yaml: cannot be read")])
def test_what_no_job_can_be_configured_with_ends_the_storm_at_once(tmp_path: Path, error: Exception) -> None:
    """The storm may be repeated where the configuration is, and then counts no job as bad."""

    def execute(*_: object) -> Verdict:
        raise error

    with pytest.raises(type(error)):
        run_storm(storm(tmp_path), execute, lambda _: None)
    ran: Ran = []
    assert run_storm(storm(tmp_path), executing(ran), lambda _: None).failed == []


@pytest.mark.parametrize(
    "text", ["buy milk", "buy milk\n", "[1]\n", '{"seed": 1}\n', '{"seed": 1}', "\xe9\n", '{"job": 1, "lay\n']
)
def test_a_file_that_is_no_ledger_is_kept(tmp_path: Path, text: str) -> None:
    """A wrong file is named, and nothing in it is taken for a line that was cut."""
    (tmp_path / "ledger.jsonl").write_text(text, encoding="latin-1")
    with pytest.raises(ScenarioError, match="is not a ledger of these jobs"):
        open_storm(tmp_path / "ledger.jsonl")
    assert (tmp_path / "ledger.jsonl").read_text(encoding="latin-1") == text


def test_wrong_options_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as refused:
        Storm(0, 10, 1, ("hole",), tmp_path, "10gbee")
    assert len(refused.value.problems) == 3


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_a_soak_that_can_be_configured(name: str) -> None:
    """On as many ranks as its replicas need, with a kind of fault to draw."""
    scenario = LAYOUTS[name].scenario(name, 10)
    assert scenario.config is not None and scenario.soak is not None and scenario.soak.faults == 10
    config = load(
        scenario.config, environ={}, arguments=[as_argument(key, value) for key, value in scenario.set.items()]
    )
    assert scenario.nodes.ranks * scenario.nodes.count >= 2 * config.parallel.cell.size or name == "whole"


def test_a_handler_set_during_cleanup_is_kept() -> None:
    """A handler that ignores further signals during its cleanup stays in place."""
    calls = list[str]()

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with on_first_signal(lambda: calls.append("once")):
            os.kill(os.getpid(), signal.SIGINT)
        assert calls == ["once"] and signal.getsignal(signal.SIGINT) is interrupt
        with pytest.raises(KeyboardInterrupt), on_first_signal(lambda: calls.append("again")):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        assert calls == ["once", "again"] and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
