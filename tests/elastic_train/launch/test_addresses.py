"""Machines in networks of their own: as Debian installs them, and with an address that another one has, too."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from chaos.services.etcd_cluster import EtcdCluster
from chaos.services.network.namespace import Cable
from rendezvous.torchelastic.standby import ForkedWorker
from tests.conftest import PATIENCE_S, begin, eventually
from tests.elastic_train.training.live.test_live import ENDLESS, history, until_whole, write_config

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("network")]


def test_machines_whose_hosts_files_name_them_127_0_1_1_train_together(tmp_path: Path, rows: Path, laid: Cable) -> None:
    """Gloo binds what their names mean unless it is given an address: then each waits for a peer that never comes."""
    config = write_config(tmp_path, rows, 12, lane_ms=0.0)
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
    with EtcdCluster(1, host="0.0.0.0") as etcd:
        endpoint = etcd.endpoint.replace("127.0.0.1", laid.address("etcd"))
        job = ["elastic_train.cli.main", "launch", config, "--nodes", "2", "--ranks", "1"]
        job += ["--endpoint", endpoint, "--id", tmp_path.name]
        job += ["--peer-timeout-s", f"{PATIENCE_S}"]
        nodes = [
            begin_at("-", hosts, [*job, "--local-addr", laid.address("nodes")]),
            begin_at(laid.namespace, hosts, job),
        ]
        try:
            assert [node.wait(PATIENCE_S) for node in nodes] == [0, 0]
        finally:
            for node in nodes:
                node.kill()
    worlds = {line["world"] for line in history(tmp_path / "run") if line["op"] == "form"}
    assert worlds == {2}, "both trained in one world, from the first step to the last"


def test_a_node_at_an_address_that_every_machine_has_stops_nobody(tmp_path: Path, rows: Path, laid: Cable) -> None:
    """As docker's bridge has one on every host: whoever connects there meets himself, and is refused or not."""
    config = write_config(tmp_path, rows, ENDLESS, lane_ms=20.0)
    laid.refuse()
    with EtcdCluster(1, host="0.0.0.0") as etcd:
        endpoint = etcd.endpoint.replace("127.0.0.1", laid.address("etcd"))
        job = ["elastic_train.cli.main", "launch", config, "--nodes", "1:2", "--ranks", "1"]
        job += ["--endpoint", endpoint, "--id", tmp_path.name, "--local-addr", laid.address("nodes"), "--ttl-s", "60"]
        log = tmp_path / "newcomer.log"
        nodes = [begin([sys.executable, "-m", *job])]
        try:
            until_whole(tmp_path / "run", 1)
            nodes.append(begin_at(laid.namespace, Path("/etc/hosts"), job, log))
            eventually(lambda: log.exists() and "cannot be reached from here" in log.read_text(), "a word of it")
            before = steps(tmp_path / "run")
            eventually(lambda: steps(tmp_path / "run") > before + 50, "steps of the first")
        finally:
            for node in nodes:
                node.kill()
    assert [line["term"] for line in history(tmp_path / "run") if line["op"] == "form"] == [1], "one world, never ended"


def begin_at(namespace: str, hosts: Path, program: list[str], log: Path | None = None) -> ForkedWorker:
    """Begin a module's program as on a machine of its own."""
    return begin([sys.executable, "-m", "tests.network_program", namespace, str(hosts), *program], log)


def steps(run: Path) -> int:
    return sum(line["op"] == "step" for line in history(run))
