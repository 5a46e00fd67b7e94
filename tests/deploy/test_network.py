"""A live job over another region's link recovers, and its weights are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.network import over
from chaos.scenario.networks import NETWORKS
from chaos.services.network.namespace import NoNamespacesError, cable

pytestmark = [pytest.mark.deploy, pytest.mark.xdist_group("network")]


def test_a_job_across_regions_recovers_from_a_killed_worker_and_a_killed_node(tmp_path: Path) -> None:
    """30 ms one way with jitter, and one packet in a thousand lost, also to etcd."""
    try:
        with cable(NETWORKS["cross_region"]) as laid:
            found = over(laid, tmp_path, num_turns=1)
    except NoNamespacesError as error:
        pytest.skip(str(error))
    assert found["hash_equal"] is True
    assert float(str(found["round_trip_ms"])) >= 60.0, "packets passed the forwarder"
