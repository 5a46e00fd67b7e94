"""Measure the links to nodes that already train, through their agents, before joining them.

A few megabytes each way, without disturbing a running world: agents answer, not workers. Rates are always reported. A
node with a link far below the others' is named, and one whose best link is below a limit does not join: it would slow
down every exchange. No measurement is no proof: an agent may be busy, or of another version.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

from elastic_train.health.result import Finding, fail, ok, warn
from elastic_train.system.wording import counted, size
from rendezvous.agent.identity import split_endpoint
from rendezvous.agent.link_speed import LinkSpeed, measure_link
from rendezvous.context import LiveContext
from rendezvous.errors import StoreError
from rendezvous.etcd.options import etcd_options
from rendezvous.membership.known_agents import by_node
from rendezvous.membership.records import Keys, Member, read_view
from rendezvous.membership.store import Store

ENOUGH, MOST = 2, 3
"""Nodes to measure with, and the number if the first results are bad, several times."""
ETCD_S = 10.0
MEASURING_S = 3.0
"""Seconds over which a result must persist to keep a node out; a stalling machine does not stall always."""
TURNS, BUSY_S = 3, 0.1
"""Measurements per node if a link seems slow or nothing is known, and seconds of pause after a busy answer."""
FAR_BELOW, SLOW_BYTES_PER_S = 5, 25e6
"""A link is reported if it is this many times slower than the others', and below this rate, which even a machine with
cores overcommitted twelve times exceeds."""
_REMEDY = "look at its cable, at the speed of its port (ethtool), and at what else uses the link"

Measure = Callable[[tuple[str, int], str], LinkSpeed | None]


class Link(NamedTuple):
    """The measurement with one node."""

    host: str
    speed: LinkSpeed

    def __str__(self) -> str:
        return (
            f"{_rate(self.speed.takes)} from {self.host}, {_rate(self.speed.gives)} to it, there and back in "
            f"{1e3 * self.speed.round_trip_s:.1f} ms"
        )


def examine_links(launched: LiveContext, least_mb_per_s: float) -> Iterator[Finding]:
    """Yield the speed of links to some nodes of the current world; nothing if this is the only node."""
    from rendezvous.etcd.store import EtcdStore  # only here: etcd's client is slow to import

    options = etcd_options(launched.endpoints, launched.options)
    try:
        with contextlib.closing(EtcdStore(options, give_up_after_s=ETCD_S)) as store:
            nodes = neighbours(store, launched.run_id, launched.node)
    except StoreError:
        return  # not the links' fault; joining reports it
    if not nodes:
        return
    links = measured(nodes, least_mb_per_s)
    if not links:
        yield ok(
            "link", f"not measured: {counted(len(nodes), 'node')} that train do not answer, or measure with others"
        )
        return
    yield from judged(links, least_mb_per_s)


def neighbours(store: Store, run_id: str, own: str) -> list[Member]:
    """Return one member each of some other training nodes, drawn by this node's name."""
    keys = Keys(run_id)
    nodes = by_node(read_view(store.get(keys.prefix), keys).mates)
    firsts = [members[0] for name, members in sorted(nodes.items()) if name != own and members[0].agent]
    return random.Random(own).sample(firsts, min(MOST, len(firsts)))


def measured(nodes: Sequence[Member], least_mb_per_s: float, measure: Measure = measure_link) -> list[Link]:
    """Measure with some nodes in turn until all is well, or known to be slow; return the best result of each."""
    links, deadline = dict[str, Link](), time.monotonic() + MEASURING_S
    for turn, node in enumerate(cycle(nodes)):
        level = next((finding.level for finding in judged(list(links.values()), least_mb_per_s)), "warn")
        is_known = turn >= TURNS * len(nodes) and level == "warn"
        if (turn >= min(ENOUGH, len(nodes)) and level == "ok") or is_known or time.monotonic() > deadline:
            break
        if (speed := measure(split_endpoint(node.agent), node.node_id)) is None:
            time.sleep(BUSY_S)
        else:
            known = links.get(node.node_id)
            links[node.node_id] = Link(node.host, speed if known is None else speed.or_better(known.speed))
    return list(links.values())


def judged(links: Sequence[Link], least_mb_per_s: float) -> Iterator[Finding]:
    """Judge the measurements: the best by the limit, each by the others, and by what others measured there."""
    if not links:
        return
    told = "; ".join(map(str, links))
    best = [max(one.speed[way] for one in links) for way in (0, 1)]
    if min(best) < 1e6 * least_mb_per_s:
        found = f"its links are too slow: {told}; run.health_check asks for {least_mb_per_s:g} MB/s"
        yield fail("link", found, f"{_REMEDY}, or allow it by a lower number in run.health_check")
        return
    others = [max(one.speed[3 + way] for one in links) for way in (0, 1)]
    if any(map(_is_far_below, best, others)):
        yield warn(
            "link",
            f"this node's are slow: {told}; others had {_rate(others[0])} from and {_rate(others[1])} to",
            _REMEDY,
        )
    elif slow := [one for one in links if any(map(_is_far_below, one.speed[:2], best))]:
        yield warn("link", f"that to {', '.join(one.host for one in slow)} is slow: {told}", _REMEDY)
    else:
        yield ok("link", told)


def _is_far_below(mine: float, others: float) -> bool:
    return mine < min(SLOW_BYTES_PER_S, others / FAR_BELOW)


def _rate(bytes_per_s: float) -> str:
    return f"{size(bytes_per_s)}/s"
