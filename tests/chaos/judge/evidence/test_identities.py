"""Processes are identified by host, boot, pid and start time: containers count separately, and pids are reused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from chaos.judge.checker import judge
from chaos.judge.evidence.applied import pids_of
from chaos.judge.evidence.identities import AGAIN, identified
from chaos.judge.evidence.run_files import Evidence, Line, collect
from chaos.planted.edits import edit
from elastic_train.system.process_identity import process_identity
from elastic_train.tracking.history import History
from tests.chaos.recorded import record
from tests.elastic_train.tracking.unqueued import Unqueued


def formed(t: float, term: int, rank: int, pid: int, **who: object) -> Line:
    return {"op": "form", "t": t, "term": term, "rank": rank, "pid": pid, **who}


def numbers(*lines: Line) -> list[object]:
    (found,) = identified([list(lines)])
    return [line.get("pid", line.get("pids")) for line in found]


def test_a_history_says_who_wrote_it(tmp_path: Path) -> None:
    history = History(Unqueued(), tmp_path, 1, 0)
    history.form(world=1, cause="start", joined_at=None, sealed_at=None, started_at=0.0)
    history.close()
    (path,) = (tmp_path / "history").iterdir()
    line = json.loads(path.read_text())
    assert line["pid"] == os.getpid()
    assert {key: line[key] for key in process_identity()} == process_identity()


def test_equal_pids_of_two_hosts_are_two_processes() -> None:
    pods = [formed(1.0, 1, rank, 1, host=f"pod-{rank}", boot="b", born=100 + rank) for rank in range(2)]
    assert numbers(*pods, *({**pod, "term": 2} for pod in pods)) == [1, 1 + AGAIN, 1, 1 + AGAIN]


def test_a_pid_that_is_used_again_is_another_process() -> None:
    lines = [formed(1.0, 1, 0, 7, host="h", boot="b", born=1), formed(9.0, 2, 0, 7, host="h", boot="b", born=80)]
    hits: list[Line] = [{"op": "fault", "t": t, "kind": "kill_worker", "pids": [7]} for t in (5.0, 12.0)]
    assert numbers(*lines, *hits) == [7, 7 + AGAIN, [7], [7 + AGAIN]], "of those that were seen by then, the last"


def test_what_the_executor_knows_of_a_process_counts() -> None:
    lines = [formed(1.0, 1, rank, 7, host=f"h{rank}", boot="b", born=1) for rank in range(2)]
    hit: Line = {"op": "fault", "t": 5.0, "kind": "kill_rack", "pids": [7, 7, 7], "hosts": ["h1", "h0", "h2"]}
    assert numbers(*lines, hit)[2] == [7 + AGAIN, 7, 7 + 2 * AGAIN], "one that formed no world is a process of its own"


def test_older_histories_load_as_they_are() -> None:
    lines = [
        formed(1.0, 1, 0, 7),
        formed(2.0, 2, 0, 7),
        {"op": "fault", "t": 3.0, "kind": "kill_worker", "pids": [7, 9]},
    ]
    assert identified([lines]) == [lines]


@pytest.mark.parametrize(("who", "truth"), [({}, "true"), ({"host": "another pod"}, "false")])
def test_a_term_that_two_pods_hold_is_seen_though_their_pids_are_equal(tmp_path: Path, who: Line, truth: str) -> None:
    """Two rank 0s of one term, both process 1 of their pods: only the host distinguishes them."""
    folder = record(tmp_path / "run") / "faulted"
    edit(folder, lambda line: {**line, "host": "pod", "boot": "b", "born": 5} if line["op"] == "form" else line)
    path = min((folder / "history").glob("00000003-00000-*.jsonl"))
    twin = [{**json.loads(text), **who} for text in path.read_text().splitlines() if '"form"' in text]
    (folder / "history" / "00000003-00000-twin.jsonl").write_text("".join(json.dumps(line) + "\n" for line in twin))
    found = {finding.invariant: finding for finding in judge(collect(folder), collect(tmp_path / "run" / "reference"))}
    assert found["fencing"].truth == truth, found["fencing"].why


def test_ranks_of_one_world_with_equal_pids_are_all_counted(tmp_path: Path) -> None:
    """In pods, every agent's first worker may be process 25, for example."""
    folder = record(tmp_path / "run")
    shutil.copytree(folder, tmp_path / "pods")
    for run in ("faulted", "reference"):
        edit(tmp_path / "pods" / run, _in_a_pod)
    evidence = collect(tmp_path / "pods" / "faulted")
    assert [len(members) for members in pids_of(evidence).values()] == [2, 1, 3]
    findings = judge(evidence, collect(tmp_path / "pods" / "reference"))
    assert [finding for finding in findings if finding.truth != "true"] == []


def _in_a_pod(line: Line) -> Line:
    """Give every process the same pid, and a host derived from its old one."""
    if line["op"] == "form":
        return {**line, "pid": 25, "host": f"pod-{line['pid']}", "boot": "b", "born": line["pid"]}
    if isinstance(pids := line.get("pids"), list):
        return {**line, "pids": [25] * len(pids), "hosts": [f"pod-{pid}" for pid in pids]}
    return line


def test_evidence_that_is_made_again_stays_as_it_is(tmp_path: Path) -> None:
    run = collect(record(tmp_path / "run") / "faulted")
    assert isinstance(run, Evidence) and identified(run.processes) == run.processes
