"""A live job over another region's link recovers, and its weights are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.recovery.jobs import write_live_job
from benchmarks.recovery.live import LEAVE, repeat, run_job
from chaos.judge.evidence.recovery_cost import recoveries
from chaos.scenario.networks import NETWORKS
from chaos.scenario.schedule import Due
from chaos.services.network.measured import measure as measure_link
from chaos.services.network.namespace import Cable, NoNamespacesError, cable

pytestmark = [pytest.mark.deploy, pytest.mark.xdist_group("network")]


NUM_NODES, FAR, NEAR = 3, 2, 1
QUIET_S, AWAY_S = 12.0, 3.0


def over(laid: Cable, folder: Path) -> tuple[bool, float]:
    """Return whether a job whose last node is at the other end of a cable ends with the bits of one process.

    A worker at the far end is killed, then a near node. Return the link's round trip in seconds, too.
    """
    link = measure_link(laid)
    due = [
        Due("kill_worker", FAR, None, QUIET_S, is_healed=True),
        Due("kill_node", NEAR, None, QUIET_S, is_healed=True),
        Due("start_node", NEAR, None, AWAY_S),
    ]
    config = write_live_job(folder / "job", NUM_NODES)
    timeout_s = 120.0 + 4 * (2 * QUIET_S + AWAY_S)
    run = run_job(
        folder / "run", config, due, ranks=1, leave_after_s=QUIET_S, timeout_s=timeout_s, num_nodes=NUM_NODES, laid=laid
    )
    costs = [
        cost.kind for cost in recoveries(run) if cost.kind not in (LEAVE, "start_node")
    ]  # a late node may join later
    assert costs == ["kill_worker", "kill_node"]
    reference = repeat(folder / "reference", config, run)
    assert run.result is not None, "run_job returns finished jobs"
    return run.result["weights_sha256"] == reference["weights_sha256"], link.round_trip_s


def test_a_job_across_regions_recovers_from_a_killed_worker_and_a_killed_node(tmp_path: Path) -> None:
    """30 ms one way with jitter, and one packet in a thousand lost, also to etcd."""
    try:
        with cable(NETWORKS["cross_region"]) as laid:
            has_equal_bits, round_trip_s = over(laid, tmp_path)
    except NoNamespacesError as error:
        pytest.skip(str(error))
    assert has_equal_bits
    assert round_trip_s >= 0.06, "packets passed the forwarder"
