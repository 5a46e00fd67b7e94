"""Traces of ranks: taken beside training without a bit's difference, merged on one clock, counted by kind and size."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import os
import threading
from pathlib import Path
from typing import IO, Any

import pytest

from elastic_train.cli.main import main
from elastic_train.config.monitoring import ProfileConfig
from elastic_train.errors import ConfigError
from elastic_train.insight import tracing
from elastic_train.insight.phases import PHASES, StepClock
from elastic_train.insight.tracing import Tracer, trace_name
from elastic_train.parallel.point_to_point import Traffic
from elastic_train.runs.traces import clock_offsets, merge_all
from tests.conftest import no_thread, start
from tests.elastic_train.training.jobs import CLASSIFIER, config, result, succeed

BASE_NS = 1_700_000_000_000_000_000
MS = 1_000_000


class Heard:
    """A group that notes who listens."""

    traffic: Traffic | None = None

    def listen(self, traffic: Traffic | None) -> None:
        self.traffic = traffic


def written(run: Path, rank: int, host: str, ahead_ns: int, *, base_ns: int = BASE_NS) -> None:
    """Write a trace with one event, at 5 ms by the first host's clock, of a rank whose clock is ahead."""
    event = {
        "ph": "X",
        "name": "work",
        "pid": 77,
        "tid": 1,
        "ts": (5 * MS + ahead_ns + BASE_NS - base_ns) / 1e3,
        "dur": 1,
    }
    named = {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "args": {"name": "python"}}
    facts = {"rank": rank, "term": 2, "host": host, "first_step": 10, "operations_left_out": 0}
    gathered = {"10": BASE_NS + 7 * MS + ahead_ns + rank * 1000, "11": BASE_NS + 9 * MS + ahead_ns - rank * 1000}
    operations = [["send", 5000, 0.001], ["send", 9000, 0.001], ["send", 10_001, 0.5], ["all_reduce", 100, None]]
    tree = {
        "baseTimeNanoseconds": base_ns,
        "traceEvents": [event, named],
        "elasticTrain": {**facts, "gathered_ns": gathered, "operations": operations},
    }
    path = run / "profile" / trace_name(10, 2, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump(tree, file)


def opened(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        tree: dict[str, Any] = json.load(file)
    return tree


def test_traces_of_machines_with_other_clocks_lie_over_one_another(tmp_path: Path) -> None:
    """The second machine is three seconds ahead, and counts from elsewhere: the work was at one moment."""
    written(tmp_path, 0, "alpha", 0)
    written(tmp_path, 1, "beta", 3000 * MS, base_ns=BASE_NS - 500 * MS)
    [merged] = merge_all(tmp_path)
    assert (merged.step, merged.term, merged.ranks) == (10, 2, [0, 1])
    assert merged.offsets_ms == {"alpha": 0.0, "beta": pytest.approx(3000.0)}
    assert merged.spread_ms == pytest.approx(0.001)
    events = opened(merged.path)["traceEvents"]
    work = [event for event in events if event["name"] == "work"]
    assert [event["ts"] for event in work] == [pytest.approx(5000.0), pytest.approx(5000.0, abs=0.01)]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [names[event["pid"]] for event in work] == ["rank 0 on alpha", "rank 1 on beta"]


def test_ranks_of_one_machine_share_a_clock() -> None:
    """One that had to wait for a core comes late; the earliest of a machine counts."""
    late = [("a", {"1": 100}), ("a", {"1": 900}), ("b", {"1": 1100}), ("b", {"1": 5000})]
    assert clock_offsets(late) == ({"a": 0.0, "b": 1000.0}, 0.0)
    assert clock_offsets([("a", {"1": 100}), ("b", {"2": 900})]) == ({"a": 0.0, "b": 0.0}, 0.0)


def test_traffic_is_added_up_by_kind_and_size(tmp_path: Path) -> None:
    """Of operations on a device nobody knows how long they took."""
    written(tmp_path, 0, "alpha", 0)
    [merged] = merge_all(tmp_path)
    found = [(one.kind, one.up_to, one.calls, one.num_bytes, one.bytes_per_s) for one in merged.traffic]
    assert found == [
        ("all_reduce", 100, 1, 100, None),
        ("send", 10_000, 2, 14_000, pytest.approx(7e6)),
        ("send", 100_000, 1, 10_001, pytest.approx(20_002)),
    ]


def test_a_run_without_traces_and_a_torn_trace_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So is one that the disk has damaged."""
    with pytest.raises(ConfigError, match=r"set profile\.at_steps"):
        merge_all(tmp_path)
    written(tmp_path, 0, "alpha", 0)
    path = tmp_path / "profile" / trace_name(10, 2, 0)
    whole = path.read_bytes()
    for content in (whole[:50], whole[:50] + bytes(100) + whole[150:]):
        path.write_bytes(content)
        with pytest.raises(SystemExit) as left:
            main(["profile", str(tmp_path)])
        assert (left.value.code, "cannot be read" in capsys.readouterr().err) == (2, True)


def on_a_full_disk(path: Path, *_: object, **__: object) -> IO[str]:
    """Open a file that has room for its first bytes."""
    path.write_bytes(b"half of a trace")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@pytest.mark.slow
def test_a_tracer_listens_for_its_steps_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the end of the step before to the end of its last; where the folder is a file, or full, one sentence."""
    clock, group = StepClock(), Heard()
    tracer = Tracer(ProfileConfig(at_steps=(2, 3, 5)), tmp_path, rank=3, term=1, clock=clock, group=group)
    heard = []
    for step in range(5):
        tracer.applied(step)
        heard.append((clock.listener is not None, group.traffic is not None))
        clock.mark("forward")
        if group.traffic is not None:
            group.traffic.note("send", 64)
        clock.mark("wait")
    assert heard == [(on, on) for on in (False, True, True, False, True)]
    tracer.close()
    assert [path.name for path in sorted((tmp_path / "profile").iterdir())] == [
        "step-000000000002",
        "step-000000000005",
    ]
    facts = opened(tmp_path / "profile" / trace_name(2, 1, 3))["elasticTrain"]
    assert (list(facts["gathered_ns"]), [kind for kind, _, _ in facts["operations"]]) == (["2", "3"], ["send", "send"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "profile").write_text("in the way")
    broken = Tracer(ProfileConfig(at_steps=(1, 2, 4, 5)), tmp_path / "full", rank=0, term=1, clock=clock, group=group)
    with caplog.at_level(logging.WARNING):
        for step in range(8):
            broken.applied(step)
            if step == 2:
                broken.close()
    assert [record.message.count("training continues without traces") for record in caplog.records] == [1]
    caplog.clear()
    with monkeypatch.context() as limited, caplog.at_level(logging.WARNING):
        limited.setattr(threading.Thread, "start", no_thread)
        alone = Tracer(ProfileConfig(at_steps=(1,)), tmp_path / "alone", rank=0, term=1, clock=clock, group=group)
        for step in range(2):
            alone.applied(step)
        alone.close()
    assert "the trace of step 1 was lost (can't start new thread): training continues" in caplog.text
    caplog.clear()
    (tmp_path / "small").mkdir()
    full = Tracer(ProfileConfig(at_steps=(1, 2)), tmp_path / "small", rank=0, term=1, clock=clock, group=group)
    monkeypatch.setattr(tracing.gzip, "open", on_a_full_disk)
    with caplog.at_level(logging.WARNING):
        for step in range(4):
            full.applied(step)
        full.close()
    (record,) = caplog.records
    assert "No space left on device" in record.message and "make room" in record.message
    assert [path for path in (tmp_path / "small").rglob("*") if path.is_file()] == [], "no half of a trace is left"


@pytest.mark.slow
def test_traces_of_a_real_job_change_no_bit(tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks, traced, have the hash of one that is not; merged, there are steps, phases and exchanges of both."""
    tree = {**CLASSIFIER, "max_steps": 6, "validation": {}}
    succeed(start([config(tmp_path / "alone", rows, tree)]))
    keys = ["--profile.at-steps", "[3, 4]", "--profile.ranks", "all"]
    done = start([config(tmp_path / "two", rows, tree), *keys], num_ranks=2)
    succeed(done)
    assert result(tmp_path / "two")["weights_sha256"] == result(tmp_path / "alone")["weights_sha256"]
    with pytest.raises(SystemExit) as left:
        main(["profile", str(tmp_path / "two" / "run"), "--json"])
    assert left.value.code == 0
    [merged] = json.loads(capsys.readouterr().out)
    assert (merged["step"], merged["ranks"], set(merged["offsets_ms"].values())) == (3, [0, 1], {0.0})
    assert {"all_gather", "send", "receive"} <= {one["kind"] for one in merged["traffic"]}
    events = opened(Path(merged["path"]))["traceEvents"]
    for kind, names in (
        ("steps", {"step 3", "step 4"}),
        ("phases", set(PHASES) - {"to_device"}),
        ("exchanges", {"send"}),
    ):
        found = [event for event in events if event.get("cat") == kind and event["name"] in names]
        assert {event["name"] for event in found} == names
        assert len({event["pid"] for event in found}) == 2
    ops = [event for event in events if event.get("cat") == "cpu_op"]
    steps = [event for event in events if event.get("cat") == "steps"]
    assert ops and min(event["ts"] for event in steps) <= min(event["ts"] for event in ops)
    assert max(event["ts"] for event in ops) <= max(event["ts"] + event["dur"] for event in steps)
