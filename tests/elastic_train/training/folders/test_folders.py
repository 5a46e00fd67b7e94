"""Folders that freeze, or that one node cannot write: no rank loses its state and no world ends."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.judge.evidence.run_files import collect
from chaos.services.etcd_cluster import EtcdCluster
from chaos.services.freezing_disk import FreezingDisk
from rendezvous import EtcdServer
from rendezvous.etcd.connection import Connection, list_prefix
from rendezvous.etcd.options import etcd_options
from rendezvous.membership.records import Keys
from tests.conftest import PATIENCE_S, eventually
from tests.elastic_train.training.live.test_live import (
    JOB,
    STARTED,
    launch,
    nothing_left,
    undisturbed,
    until_whole,
    weights,
    write_config,
)

__all__ = ["nothing_left", "undisturbed"]  # fixtures
pytestmark = pytest.mark.process
NUM_STEPS = 60


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with EtcdCluster(num_members=1) as cluster:
        yield cluster.members[0]


def step_of(log: Path) -> int:
    """Return the last step that a node has logged."""
    steps = re.findall(r"^training: ([\d,]+) of", log.read_text(), re.MULTILINE)
    return max((int(step.replace(",", "")) for step in steps), default=0)


def num_members(etcd: EtcdServer, run_id: str) -> int:
    connection = Connection(etcd_options(etcd.endpoint))
    try:
        return len(list_prefix(connection, Keys(run_id).members, PATIENCE_S).entries)
    finally:
        connection.close()


def test_a_folder_that_freezes_costs_no_state(
    tmp_path: Path, rows: Path, etcd: EtcdServer, disk: FreezingDisk, undisturbed: Callable[[int], object]
) -> None:
    """All of the run's files are on one file system, which freezes for longer than `hang_timeout_s`.

    The ranks continue in their world; the histories afterwards contain the events of that time.
    """
    job = launch(tmp_path, etcd, write_config(tmp_path, rows, 100_000, lane_ms=40.0), ranks=2, nnodes="1")
    term, pids = until_whole(disk.folder, 2)
    disk.freeze()
    frozen_at, before = time.monotonic(), step_of(tmp_path / "node.log")
    frozen_s = 3.0 * float(str(JOB["hang_timeout_s"]))
    eventually(
        lambda: time.monotonic() - frozen_at > frozen_s and step_of(tmp_path / "node.log") > before + 20,
        "training beside a folder that is frozen",
    )
    disk.thaw()
    eventually(lambda: any(disk.folder.glob("commits/[0-9]*.json")), "a commit")
    formed = collect(disk.folder).of("form")  # read before ranks leave: one may be asked a step earlier
    assert {line["pid"] for line in formed} == set(pids.values())
    assert {line["term"] for line in formed} == {term}
    asked_at = step_of(tmp_path / "node.log")
    job.send_signal(signal.SIGTERM)
    job.wait(PATIENCE_S)
    run = collect(disk.folder)
    assert run.result is not None and run.result["status"] == "preempted"
    steps = [line["step"] for line in run.of("step") if line["rank"] == 1]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= asked_at, "no line of those seconds is lost"
    assert weights(run) == undisturbed(int(str(run.result["step"])))


def test_a_first_node_without_a_folder_costs_the_others_nothing(
    tmp_path: Path, rows: Path, etcd: EtcdServer, undisturbed: Callable[[int], object]
) -> None:
    """The node continues in the same world, reports once that it cannot write, and ends with the same weights."""
    (tmp_path / "file").write_text("not a folder")
    bad_node, good_node = tmp_path / "bad" / "job", tmp_path / "good" / "job"
    folders = {bad_node: tmp_path / "file" / "run", good_node: tmp_path / "run"}
    config = write_config(tmp_path, rows, NUM_STEPS)
    for node in folders:
        node.mkdir(parents=True)
        mine = {"ELASTIC_TRAIN__RUN__DIR": str(folders[node])}
        shared = {"ELASTIC_TRAIN__CHECKPOINT__URL": str(tmp_path / "commits")}
        launch(node, etcd, config, ranks=1, nnodes="2", **mine, **shared)
        if node is bad_node:
            eventually(lambda: num_members(etcd, "job") == 1, "the first node's registration")
    for job in list(STARTED):
        job.wait(280)
    said = {node: (node / "node.log").read_text() for node in folders}
    lines = [json.loads(text) for path in (tmp_path / "run" / "history").iterdir() for text in path.open()]
    assert {line["world"] for line in lines if line["op"] == "form"} == {2}, said
    (end,) = [line for line in lines if line["op"] == "end"]
    assert (end["step"], end["weights_sha256"], end["term"]) == (NUM_STEPS, undisturbed(NUM_STEPS), 1)
    assert said[bad_node].count("cannot be written (") == 1, said[bad_node]
    assert "cannot be written (" not in said[good_node]
