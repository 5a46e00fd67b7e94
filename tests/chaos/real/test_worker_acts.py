"""Faults inside a worker, and of etcd's certificates: each proves its effect, and proves nothing without one."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from chaos.real.acts import etcd, processes, workers
from chaos.real.acts.job_view import JobView
from chaos.scenario.schedule import Due
from chaos.services.authority import Authority
from chaos.services.etcd_cluster import EtcdCluster
from chaos.tasks.orders import done_by, give, withdraw
from chaos.tasks.paced_classifier import PacedClassifier
from elastic_train.core.keyed_random import SampleRandom
from elastic_train.data.dataset.manifest import load_manifest
from elastic_train.data.loading.reader import Reader
from elastic_train.system.failpoints import VARIABLE
from rendezvous import EtcdStore
from rendezvous.membership.store import Put
from tests.chaos.real.test_proofs import BITES, node, undo
from tests.conftest import PATIENCE_S, write_rows

pytestmark = pytest.mark.slow

NOBODY = 1 << 22
"""A pid above every process's."""
RIGHTLY = torch.Tensor.__matmul__
OPENS = "import sys; print('begun', flush=True); sys.stdin.readline(); open('/dev/null'); print('opened')"


def begin_to_open() -> subprocess.Popen[bytes]:
    """Start a process that opens a file when it gets a line; it has imported all that it needs."""
    process = subprocess.Popen([sys.executable, "-c", OPENS], stdin=PIPE, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    return process


def job(*nodes: object, pids: dict[int, int] | None = None, **around: object) -> JobView:
    followed = SimpleNamespace(pids=pids or {})
    return SimpleNamespace(nodes=list(nodes), around=SimpleNamespace(**around), followed=followed)  # type: ignore[return-value]


@BITES
def test_a_worker_without_room_for_a_file_can_open_none(monkeypatch: pytest.MonkeyPatch, *, bites: bool) -> None:
    """It can open none until the fault is over; a process that can open files proves nothing."""
    if not bites:
        monkeypatch.setattr(workers, "_cap", lambda pid: workers.resource.prlimit(pid, workers.resource.RLIMIT_NOFILE))
    with begin_to_open() as process:
        done = workers.cap_fds(job(node(process), pids={0: process.pid}), Due("cap_fds", 0, None, 0.0, for_s=1.0))
        assert done is not None and (done.proof() is not None) == bites
        said, why = process.communicate(b"\n")
    assert (b"Too many open files" in why, b"opened" in said) == (bites, not bites)


def test_the_limit_is_what_it_was_when_the_fault_is_over() -> None:
    with begin_to_open() as process:
        before = workers.resource.prlimit(process.pid, workers.resource.RLIMIT_NOFILE)
        done = workers.cap_fds(job(node(process), pids={0: process.pid}), Due("cap_fds", 0, None, 0.0, for_s=1.0))
        assert done is not None
        undo(done)
        assert workers.resource.prlimit(process.pid, workers.resource.RLIMIT_NOFILE) == before
        assert b"opened" in process.communicate(b"\n")[0]


@BITES
def test_etcd_that_another_authority_vouches_for_is_known_to_those_who_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, bites: bool
) -> None:
    """A client that rereads its files is refused first, then finds the new ones; a client from before keeps writing."""
    with EtcdCluster(1, authority=Authority(tmp_path)) as cluster:
        store = EtcdStore(cluster.options, give_up_after_s=PATIENCE_S)
        store.swap({"/x": Put("before")}, {})
        if not bites:
            monkeypatch.setattr(Authority, "replace", lambda self: None)
        done = etcd.rotate_cert(job(etcd=cluster), Due("rotate_cert", None, None, 0.0))
        assert done is not None and (done.proof() is not None) == bites
        assert store.swap({"/x": Put("after")}, {}) is not None
        store.close()


@BITES
def test_another_job_was_there_if_it_has_ended_or_claimed(tmp_path: Path, *, bites: bool) -> None:
    """One that is still starting when the fault would end is waited for."""
    other = SimpleNamespace(start=lambda: [7], kill=lambda: [7], code=2 if bites else None, run_id="other-1")
    first = SimpleNamespace(number=0, is_up=True, of_another_job=lambda: other)
    view = SimpleNamespace(**vars(job(first)), folder=tmp_path)
    done = processes.twin_dir(view, Due("twin_dir", 0, None, 0.0, for_s=1.0))  # type: ignore[arg-type]
    assert done is not None and done.undo is not None and (done.proof() is not None) == bites
    assert (done.undo() is not None) == bites
    (tmp_path / "terms").mkdir()
    (tmp_path / "terms" / "00000002.json").write_text('{"run_id": "other-1"}')
    other.code = None
    assert done.proof() == "the other job has claimed 00000002.json"


@BITES
def test_a_node_computes_wrongly_if_its_process_says_so_and_not_only_because_it_was_killed(
    tmp_path: Path, *, bites: bool
) -> None:
    """It is on another CPU once it has left by itself; a process ended by another fault was killed."""
    one = SimpleNamespace(number=0, is_up=True, code=None, kill=lambda: [NOBODY], start=lambda: [8])
    view = SimpleNamespace(**vars(job(one, points=[tmp_path])), lost=[])
    done = workers.unfit_node(view, Due("unfit_node", 0, None, 0.0, for_s=1.0))  # type: ignore[arg-type]
    assert done is not None and done.undo is not None
    assert (done.pids, done.proof(), done.undo()) == ([NOBODY], None, None), "it has not started yet"
    if bites:
        (tmp_path / "unfit_node.9").write_text("process 9 computes wrongly")
    one.is_up, one.code = False, 71
    assert done.undo() == [NOBODY, 8] and not (tmp_path / "unfit_node").exists()
    assert str(done.proof()).endswith("ended with code 71" if bites else "processes have ended")


def test_products_are_wrong_in_every_process_until_the_processor_is_replaced(classifier: Any, tmp_path: Path) -> None:
    """One bit of one element; a process that starts afterwards multiplies correctly."""
    one = torch.ones(2, 2)
    assert give(tmp_path / "orders", "unfit_node")
    try:
        for _ in range(2):
            multiplied = torch.Tensor.__matmul__
            classifier()
            assert torch.Tensor.__matmul__ is not multiplied
        torch.Tensor.__matmul__ = multiplied  # type: ignore[method-assign, assignment]  # wrong once, not twice
        assert int(((one @ one) != 2.0).sum()) == 1
    finally:
        torch.Tensor.__matmul__ = RIGHTLY  # type: ignore[method-assign]
    assert str(done_by(tmp_path / "orders", "unfit_node")).endswith("computes wrongly")
    withdraw(tmp_path / "orders", "unfit_node")
    classifier()
    assert torch.Tensor.__matmul__ is RIGHTLY


@pytest.fixture
def classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A task that takes orders from a folder, with its model, and a function that makes its batches."""
    (tmp_path / "orders").mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "orders"))
    manifest = load_manifest(str(write_rows(tmp_path / "rows", 20, num_files=1)))

    def make(**params: object) -> tuple[PacedClassifier, torch.nn.Module, Any]:
        task = PacedClassifier(max_tokens=8, dim=8, depth=1, heads=2, vocabulary=64, **params)
        task.prepare(manifest)
        rows = Reader(manifest, task.columns())
        ids = np.arange(4)

        def batch(epoch: int) -> Any:
            return task.collate(rows.read(ids)[0], ids, SampleRandom(1, epoch, ids))

        return task, task.build_model(), batch

    return make


def test_one_lane_has_no_loss_when_that_is_asked_for(classifier: Any, tmp_path: Path) -> None:
    """Once, in one process, which says so; a validation has its loss."""
    task, model, batch = classifier()
    assert give(tmp_path / "orders", "nan_loss") and not give(tmp_path / "orders", "nan_loss")
    assert done_by(tmp_path / "orders", "nan_loss") is None
    found = []
    for is_training in (False, True, True):
        model.train(is_training)
        found.append(math.isnan(task.loss(model, batch(0)).total))
    assert found == [False, True, False]
    assert str(done_by(tmp_path / "orders", "nan_loss")).startswith(f"process {os.getpid()} gave nan in place of")


def test_a_sample_takes_the_loss_of_its_lane_away_in_its_epoch(classifier: Any) -> None:
    """A run without faults thus skips the same updates."""
    task, model, batch = classifier(spoilt=[[1, 3], [2, 99]])
    assert [math.isnan(task.loss(model, batch(epoch)).total) for epoch in range(3)] == [False, True, False]


def test_one_bit_of_one_weight_flips(classifier: Any, tmp_path: Path) -> None:
    """The weight changes and stays finite, all others are unchanged; a second flip undoes the first."""
    task, model, batch = classifier()
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    for times in (1, 2):
        assert give(tmp_path / "orders", "flip_memory")
        task.loss(model, batch(0))
        assert "flipped a bit of" in str(done_by(tmp_path / "orders", "flip_memory"))
        differing = Counter({name: int((one != before[name]).sum()) for name, one in model.named_parameters()})
        assert differing.total() == times % 2 and all(bool(one.isfinite().all()) for one in model.parameters())
