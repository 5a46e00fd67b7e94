"""A node with a slow link wants to join a running world: it is rejected by name, and accepted once the link is fast."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.services.etcd_cluster import EtcdCluster
from chaos.services.network.namespace import Cable, NoNamespacesError, cable
from elastic_train.runs.glance import look
from tests.conftest import PATIENCE_S, begin
from tests.elastic_train.launch.test_addresses import begin_at
from tests.elastic_train.training.live.test_live import ENDLESS, eventually, history, until_whole, write_config

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("network")]
DELAY_S = 0.1
LEAST = 50
"""MB/s: with this packet delay not even the largest request reaches this rate in either direction."""


@pytest.fixture
def laid() -> Iterator[Cable]:
    try:
        with cable() as laid:
            if laid.relay is None:
                pytest.skip("no TUN interfaces here")
            yield laid
    except NoNamespacesError as error:
        pytest.skip(str(error))


def test_a_node_behind_a_slow_link_costs_a_world_nothing(tmp_path: Path, rows: Path, laid: Cable) -> None:
    """Its launcher exits with 71, and its log has the rates and what to do; the world continues, and accepts it later.

    The rates are reported even then.
    """
    config = write_config(tmp_path, rows, ENDLESS)
    logs = [tmp_path / name for name in ("slow.log", "well.log")]
    with EtcdCluster(1, host="0.0.0.0") as etcd:
        endpoint = etcd.endpoint.replace("127.0.0.1", laid.address("etcd"))
        job = ["elastic_train.cli.main", "launch", config, "--nodes", "1:2", "--ranks", "1"]
        job += ["--endpoint", endpoint, "--id", tmp_path.name, "--ttl-s", "60"]
        nodes = [begin([sys.executable, "-m", *job, "--local-addr", laid.address("nodes")])]
        try:
            term, _ = until_whole(tmp_path / "run", 1)
            laid.worsen(delay_s=DELAY_S)
            limited = [*job, "--run.health_check", str(LEAST)]
            nodes.append(begin_at(laid.namespace, Path("/etc/hosts"), limited, logs[0]))
            assert nodes[-1].wait(PATIENCE_S) == 71, logs[0].read_text()
            laid.mend()
            nodes.append(begin_at(laid.namespace, Path("/etc/hosts"), job, logs[1]))
            assert until_whole(tmp_path / "run", 2)[0] == term + 1, "no world with the slow one"
            eventually(lambda: "health check: link: " in logs[1].read_text(), "the rates of the other")
        finally:
            for node in nodes:
                node.kill()
    said = logs[0].read_text()
    assert "fails its health check and does not join" in said and "its links are too slow" in said
    assert "run.health_check asks for 50 MB/s" in said and "look at its cable" in said
    assert any("left out: node" in what for _, what in look(tmp_path / "run").recent)
    assert len({line["term"] for line in history(tmp_path / "run") if line["op"] == "form"}) == 2
