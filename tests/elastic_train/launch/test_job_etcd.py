"""The etcd that a job starts for itself: restarted whenever it ends, also after a restart that failed."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from elastic_train.launch import job_etcd
from elastic_train.launch.job_etcd import JobEtcd
from elastic_train.launch.options import Launch
from rendezvous.errors import ServerError, StoreUnavailableError
from rendezvous.etcd.server import EtcdServer
from rendezvous.waiting import begin
from tests.conftest import eventually


def test_a_jobs_etcd_is_started_again_after_a_restart_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler may signal a job twice: the second signal meets an etcd that is just being restarted."""
    begin, num_begun = EtcdServer.begin, 0

    def begin_not_the_second_time(server: EtcdServer) -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == 2:
            raise ServerError("no room for another process")
        begin(server)

    monkeypatch.setattr(EtcdServer, "begin", begin_not_the_second_time)
    with EtcdServer() as server, contextlib.closing(JobEtcd(server.endpoint, server)) as etcd:
        etcd.keep()
        assert server.pid is not None
        os.kill(server.pid, signal.SIGTERM)
        eventually(lambda: num_begun == 3 and server.pid is not None, "the etcd is started again", timeout_s=20.0)


class Lost:
    """An etcd that has ended and cannot be started again, and a client of it."""

    endpoint, has_ended, pid = "127.0.0.1:1", True, None

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def start(self) -> None:
        pass

    def start_again(self) -> NoReturn:
        raise ServerError("no room on the disk")

    def get(self, prefix: str) -> NoReturn:
        raise StoreUnavailableError("no etcd answers")

    def close(self) -> None:
        pass


def test_a_first_node_that_is_done_does_not_wait_for_others_in_an_etcd_that_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would ask the etcd that it has given up for ever."""
    for name in ("EtcdServer", "EtcdStore"):
        monkeypatch.setattr(job_etcd, name, Lost)
    monkeypatch.setattr(job_etcd, "MOST_TRIES", 1)
    plan = Launch(Path("c.yaml"), (), 1, 2, 1, "job", None, "live", max_restarts=1, ttl_s=3.0, grace_s=1.0)

    def run() -> None:
        with job_etcd.job_etcd(plan) as etcd:
            etcd.keep()

    begin("the first node", run).result(30.0)
