"""Long runs and their record: drawn at a stated rate, continued after any end, and the same when repeated."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from chaos.errors import ScenarioError
from chaos.sim.campaign import command, pool
from chaos.sim.campaign.command import Campaign, entry_of, open_ledger, run_campaign
from chaos.sim.campaign.long_runs import Draw, nodes_of
from chaos.sim.campaign.simulate import Case, Outcome, case_of, simulate
from chaos.sim.campaign.swarm import AT_PLACES, DAMAGE
from chaos.sim.job.fault import SimFault
from chaos.sim.job.job import Job
from chaos.sim.job.kinds import KINDS
from chaos.sim.job.shape import Shape
from tests.conftest import PATIENCE_S, ROOT

pytestmark = pytest.mark.slow

RECORD = ROOT / "tests" / "chaos" / "recorded_long.jsonl"
"""Regenerate with: rm tests/chaos/recorded_long.jsonl && elastic-chaos sim --nodes 16..64 --hours 0.1 --seeds 2
--ledger tests/chaos/recorded_long.jsonl"""
DRAWN = Draw((16, 64), 0.1)
SIMULATED = ("elastic_train", "rendezvous", "chaos/sim")


def test_a_recorded_long_run_repeats_exactly() -> None:
    """Its faults and its verdict; and, while the code is that of its commit, every line of its history."""
    (entry, *_) = open_ledger(RECORD).entries
    assert entry.options == DRAWN.options
    found = entry_of(simulate(DRAWN.case(entry.seed)), entry.options, entry.code)
    assert found.violated == ()
    assert sum(found.faults.values()) >= 3 and found.nodes >= 16
    if _is_unchanged_since(entry.code):
        assert found == entry


def _is_unchanged_since(commit: str) -> bool:
    if not commit or commit.endswith("+"):
        return False
    command = ["git", "-C", str(ROOT), "diff", "--quiet", commit, "--", *SIMULATED]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0


def test_every_kind_is_drawn_often_enough() -> None:
    """In fifteen hundred seeds each kind and place comes at least ten times; damage that must be read, more often."""
    drawn, read = Counter[str](), 0
    for seed in range(1500):
        faults = case_of(seed).faults
        drawn.update({f"{fault.kind}@{fault.point}" if fault.point else fault.kind for fault in faults})
        damaged = [fault.at_s for fault in faults if fault.kind in DAMAGE]
        read += any(fault.at_s >= at for fault in faults if fault.kind == "kill_job" for at in damaged)
    assert all(drawn[name] >= 10 for name in (*KINDS, *AT_PLACES)), drawn
    assert read >= 75


def test_a_long_run_may_train_in_shards() -> None:
    """On request every seed's job is sharded, in all modes and with one to three copies; and it is valid."""
    draw = Draw((6, 9), 0.05, in_shards=True)
    shapes = [draw.case(seed).shape for seed in range(60)]
    assert {(shape.shards, shape.copies) for shape in shapes} == set(
        itertools.product(("optimizer", "gradients", "parameters"), (1, 2, 3))
    )
    assert draw.options.endswith(" --shards") and not any(DRAWN.case(seed).shape.copies for seed in range(10))
    seed = next(seed for seed, shape in enumerate(shapes) if (shape.shards, shape.copies) == ("parameters", 2))
    outcome = simulate(draw.case(seed))
    assert outcome.violations == () and outcome.num_faults


def test_faults_come_at_the_stated_rate() -> None:
    """The rate is right within a few standard deviations over an hour; all requested numbers of nodes occur."""
    draw, sizes = Draw((16, 64), 1.0, 240.0), set[int]()
    for seed in range(20):
        case = draw.case(seed)
        sizes.add(case.shape.nodes)
        assert case.shape.span_s == pytest.approx(3600, rel=0.4)
        assert len(case.faults) == pytest.approx(240 * case.shape.span_s / 3600, rel=0.4)
    assert 16 <= min(sizes) < 32 < max(sizes) <= 64
    assert (nodes_of("16..64"), nodes_of("1000")) == ((16, 64), (1000, 1000))
    with pytest.raises(ScenarioError, match=r"A\.\.B"):
        nodes_of("64..16")


def test_a_fault_at_a_place_waits_for_its_moment() -> None:
    """Times count from when it is armed: the first process to reach a step's end after that is killed."""
    run = Job(Shape(), 1, (SimFault("kill", at_s=7.5, point="applied", nth=1),)).run()
    (fault,) = [line for process in run.processes for line in process if line["op"] == "fault"]
    steps = [line for process in run.processes for line in process if line["op"] == "step"]
    assert isinstance(fault["t"], float)
    before = [line for line in steps if isinstance(line["t"], float) and line["t"] < fault["t"]]
    assert fault["kind"] == "kill@applied" and len(before) > 6


def test_files_may_be_damaged_again_and_again() -> None:
    """This works as often as the previous commit is intact: the job continues from that one each time."""
    shape = Shape(nodes=2, lanes=6, epochs=14, keep_last=3)
    hits = [(SimFault("flip_bit", at_s=at_s), SimFault("kill_job", at_s=at_s + 0.5, for_s=1.0)) for at_s in (10, 24)]
    outcome = simulate(Case(1, shape, tuple(fault for pair in hits for fault in pair)))
    assert outcome.violations == ()
    assert outcome.num_faults == {"flip_bit": 2, "kill_job": 2}


def test_the_digest_does_not_depend_on_processes_or_pauses(tmp_path: Path) -> None:
    """Seeds on one process, on two, and in two runs with a torn line in between give the same digest."""
    whole = run_campaign(Campaign(range(60, 63)), is_quiet=True).fields()
    two = run_campaign(Campaign(range(60, 63), processes=2), is_quiet=True).fields()
    ledger = tmp_path / "ledger.jsonl"
    run_campaign(Campaign(range(60, 62), ledger=ledger), is_quiet=True)
    ledger.write_text(ledger.read_text()[:-9])
    resumed = run_campaign(Campaign(range(60, 63), ledger=ledger), is_quiet=True)
    again = run_campaign(Campaign(range(60, 63), ledger=ledger), is_quiet=True)
    assert (resumed.num_run, again.num_run) == (2, 0)
    for other in (two, resumed.fields(), again.fields()):
        assert {**other, "runs_per_s": 0} == {**whole, "runs_per_s": 0}


def test_an_interrupt_ends_a_ledger_and_runs_with_other_options_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends with the completed seeds; a line with other options counts as another seed."""
    outcome = simulate(case_of(60))

    def interrupted(*_: object) -> Iterator[Outcome]:
        yield outcome
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "simulate_each", interrupted)
    ledger = tmp_path / "ledger.jsonl"
    other = entry_of(outcome, "--nodes 7", "abc")
    ledger.write_text(json.dumps(asdict(other)) + "\n")
    tally = run_campaign(Campaign(range(60, 66), ledger=ledger), is_quiet=True)
    assert (len(tally.entries), tally.num_run) == (1, 1)
    assert [entry.options for entry in open_ledger(ledger).entries] == ["--nodes 7", ""]


def test_a_long_seed_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one ends only after all others, which one process has to run meanwhile; yet it comes first."""
    are_done = multiprocessing.get_context("fork").Event()

    def simulate(seed: int) -> tuple[int, bool]:
        if seed == 4:
            are_done.set()
        return seed, seed > 0 or are_done.wait(PATIENCE_S)

    monkeypatch.setattr(pool, "simulate", simulate)
    assert list(pool.simulate_each(range(5), lambda seed: seed, 2)) == [(seed, True) for seed in range(5)]  # type: ignore[arg-type, comparison-overlap]


def test_a_process_that_dies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seed has no outcome, and the campaign must not simply look shorter."""
    monkeypatch.setattr(pool, "simulate", lambda seed: os._exit(1) if seed == 2 else seed)
    with pytest.raises(EOFError):
        list(pool.simulate_each(range(4), lambda seed: seed, 2))  # type: ignore[arg-type]
