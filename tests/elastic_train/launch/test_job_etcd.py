"""The etcd that a job starts for itself: restarted whenever it ends, also after a restart that failed."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from elastic_train.launch.job_etcd import JobEtcd
from rendezvous.errors import ServerError
from rendezvous.etcd.server import EtcdServer
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
