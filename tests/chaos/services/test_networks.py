"""Networks of `elastic-chaos run --network`: laid, measured, and laid again after a fault."""

from __future__ import annotations

import pytest

from chaos.scenario.networks import NETWORKS
from chaos.services.network.measured import measure
from chaos.services.network.namespace import Cable, NoNamespacesError, cable

pytestmark = pytest.mark.xdist_group("network")


@pytest.mark.process
@pytest.mark.parametrize("name", ["10gbe", "cross_zone"])
def test_a_link_is_no_better_than_its_network_also_after_faults(name: str) -> None:
    """Neither quicker nor with more bytes per second; a cut ends it, and its repair brings it back."""
    network = NETWORKS[name]
    least_s = 0.0 if network.round_trip_s is None else network.round_trip_s[0]
    try:
        with cable(network) as laid:
            for spoil in (None, Cable.part, Cable.silence, Cable.pull):
                if spoil is not None:
                    spoil(laid)
                    assert not laid.answers_inside("nodes")
                    laid.mend()
                link = measure(laid)
                assert link.round_trip_s >= least_s and link.bytes_per_s <= 1.05 * network.bytes_per_s
    except NoNamespacesError as error:
        pytest.skip(str(error))


def test_every_network_has_sources() -> None:
    assert all(network.sources for network in NETWORKS.values())
    assert all(source.startswith("http") for network in NETWORKS.values() for source in network.sources)
