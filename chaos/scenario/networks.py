"""Networks between nodes, as data with sources; `elastic-chaos run --network NAME` puts the last node behind one.

Rates and times are those of one connection. What a machine makes of them is measured and printed when the link is laid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_DROPS = "http://www.layer9.org/2015/08/session-31-experience-track1-pingmesh.html"


@dataclass(frozen=True, slots=True)
class Network:
    """A link: bytes per second in each direction, the round trip, and the fraction of packets that are lost.

    `round_trip_s` is the range of round trips, None for that of a veth pair: a switch adds less than its kernel code.
    """

    meaning: str
    bytes_per_s: float
    sources: tuple[str, ...]
    round_trip_s: tuple[float, float] | None = None
    loss: float = 0.0

    @property
    def is_far(self) -> bool:
        """True if packets take longer than over a veth pair, or are lost."""
        return self.round_trip_s is not None or self.loss > 0

    def __str__(self) -> str:
        rate, times = f"{8e-9 * self.bytes_per_s:g} Gbit/s", self.round_trip_s
        between = "a veth pair's" if times is None else f"{1e3 * times[0]:g} to {1e3 * times[1]:g} ms"
        return f"{rate}, round trip {between}, loss {100 * self.loss:g} %"


NETWORKS: Mapping[str, Network] = {
    "10gbe": Network("10 Gigabit Ethernet in one rack", 1.25e9, ("https://standards.ieee.org/ieee/802.3ae/1096/",)),
    "100gbe": Network("100 Gigabit Ethernet in one rack", 12.5e9, ("https://standards.ieee.org/ieee/802.3ba/4131/",)),
    "cross_zone": Network(
        "two availability zones of a cloud's region",
        0.625e9,
        (
            "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-network-bandwidth.html",
            "https://www.flashgrid.io/news/latencies-between-aws-availability-zones-what-are-they-and-how-to-minimize-them/",
            _DROPS,
        ),
        (0.5e-3, 1.5e-3),
        1e-4,
    ),
    "cross_region": Network(
        "two regions of a cloud, a continent apart",
        0.125e9,
        ("https://www.cloudping.co/", _DROPS),
        (60e-3, 64e-3),
        1e-3,
    ),
}
