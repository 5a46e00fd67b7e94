"""Draw a run's faults from a seed.

Each seed first draws which kinds occur at all, then how many faults (swarm testing: Groce, Zhang, Eide, Chen, Regehr:
Swarm Testing, ISSTA 2012): a run with three kinds reaches states that a run with all kinds never does.
"""

from __future__ import annotations

import random
from dataclasses import replace

from chaos.scenario.kinds import kind_of
from chaos.sim.job.fault import AT_POINTS, POINTS, SimFault
from chaos.sim.job.kinds import KINDS
from chaos.sim.job.shape import Shape

IN_RECOVERY = 0.25
"""Share of faults that follow within one lease of the previous one, while the job is still recovering."""
IS_READ = 0.75
"""Share of damages after which all nodes die within a lease, so the files are read. Else members hold the state."""
LONGER = {"hang_worker": 4.0, "sever_link": 10.0, "stale_listing": 4.0}
"""Duration factors of kinds that must last until others notice."""
LONE_S = 120.0
"""Seconds over which the cost of one bad node is measured."""
DAMAGE = tuple(kind for kind in KINDS if kind_of(kind).damages and kind != "tear_write")
OF_ETCD = ("etcd_refuses", "alien_record")
LONE = (
    *("private_storage", "other_limits", "other_code", "wrong_address", "start_twin", "alien_record"),
    *("twin_dir", "flip_memory", "unfit_node"),
)
"""Kinds that are also drawn alone, in jobs of minutes, so that what each costs the other nodes can be measured.

`twin_dir` and `flip_memory` are drawn only alone: a job without a sign of life may be taken over by another one, and a
rank with corrupt memory is found only by comparison with others that are still alive.
"""
APART = (
    "bad_row_group",
    "freeze_agent",
    "tracker_outage",
    "skew_clocks",
    "other_limits",
    "other_code",
    "wrong_address",
    "unfit_node",
    *("twin_dir", "flip_memory", "nan_loss"),
    *OF_ETCD,
)
"""Kinds that are drawn separately: from streams of their own, or only in cases of their own."""
COMMON = tuple(kind for kind in KINDS if kind not in APART)
AT_PLACES = tuple(f"{how}@{point}" for how in AT_POINTS for point in POINTS)


def draw(draws: random.Random, shape: Shape, most: int) -> tuple[SimFault, ...]:
    """Draw up to `most` faults, in order of time; those at failpoints come last."""
    chosen = draws.sample([*COMMON, *AT_PLACES], draws.randint(1, 6))
    faults: list[SimFault] = []
    for _ in range(draws.randint(1, most)):
        name, at_s = draws.choice(chosen), draws.uniform(0.0, 1.5 * shape.span_s)
        if faults and draws.random() < IN_RECOVERY:
            at_s = faults[-1].at_s + draws.uniform(0.0, shape.ttl_s)
        if "@" in name:
            faults.append(_fault(draws, shape, name, 0.0, draws.randint(1, 4 * most)))
        else:
            faults += _with_its_reader(draws, shape, _fault(draws, shape, name, at_s))
    return in_order(faults)


def draw_at_rate(draws: random.Random, shape: Shape, per_hour: float) -> tuple[SimFault, ...]:
    """Draw the faults of a long run: `per_hour` at random moments, from about its first step to its last."""
    chosen = [
        *draws.sample([*COMMON, *OF_ETCD, "nan_loss", *AT_PLACES], draws.randint(4, 16)),
        *draws.sample(DAMAGE, draws.randint(0, 2)),
    ]
    now_s, faults = shape.warm_s, list[SimFault]()
    while now_s < shape.span_s:
        is_soon = draws.random() < IN_RECOVERY
        now_s += draws.uniform(0.0, shape.ttl_s) if is_soon else draws.expovariate(per_hour / 3600 * (1 - IN_RECOVERY))
        fault = _fault(draws, shape, draws.choice(chosen), now_s, draws.randint(1, 4 * shape.nodes))
        faults += _with_its_reader(draws, shape, fault)
    return in_order(faults)


def draw_bad_data(draws: random.Random, shape: Shape) -> tuple[SimFault, ...]:
    """Draw unreadable row groups: from one node or all, for good or for a while."""
    faults = []
    for _ in range(draws.randint(1, 3)):
        node, group = draws.choice([-1, -1, *range(shape.nodes)]), draws.randrange(len(shape.rows))
        at_s, for_s = draws.uniform(0.0, shape.span_s), draws.choice((0.0, 2.0, 10.0))
        faults.append(SimFault("bad_row_group", round(at_s, 3), node=node, other=group, for_s=for_s))
    return tuple(faults)


def draw_outages(draws: random.Random, shape: Shape) -> tuple[SimFault, ...]:
    spans = [(draws.uniform(0.0, 1.2 * shape.span_s), draws.uniform(1.0, 30.0)) for _ in range(draws.randrange(4))]
    return tuple(SimFault("tracker_outage", round(at_s, 3), for_s=round(for_s, 3)) for at_s, for_s in spans)


def draw_of_etcd(draws: random.Random, shape: Shape) -> tuple[SimFault, ...]:
    """Draw etcd refusals and invalid records; a worker may die with each."""
    faults = list[SimFault]()
    for _ in range(draws.randint(1, 4)):
        fault = _fault(draws, shape, draws.choice(OF_ETCD), draws.uniform(0.0, 1.2 * shape.span_s))
        faults.append(fault)
        if draws.random() < IN_RECOVERY:
            at_s = round(fault.at_s + draws.uniform(0.0, fault.for_s), 3)
            faults.append(replace(fault, kind="kill_worker", at_s=at_s))
    return tuple(faults)


def draw_skews(draws: random.Random, shape: Shape) -> tuple[SimFault, ...]:
    """Draw nodes, not all, whose clocks are seconds off from the start."""
    nodes = draws.sample(range(shape.nodes), draws.randint(1, max(1, shape.nodes - 1)))
    return tuple(
        SimFault("skew_clocks", node=n, other=draws.randrange(2), for_s=draws.uniform(2.0, 20.0)) for n in nodes
    )


def draw_agent(draws: random.Random, shape: Shape) -> SimFault:
    """Draw an agent that freezes while its workers train on."""
    return _fault(draws, shape, "freeze_agent", draws.uniform(0.0, 1.2 * shape.span_s))


def draw_unfit(draws: random.Random, shape: Shape) -> SimFault:
    """Draw a node that restarts on a processor that computes wrongly, among other faults."""
    fault = _fault(draws, shape, "unfit_node", draws.uniform(shape.warm_s, 1.2 * shape.span_s))
    return replace(fault, for_s=round(shape.warm_s + fault.for_s, 3))


def draw_lone(draws: random.Random, shape: Shape) -> SimFault:
    """Draw one fault of one bad node, at least as long as its cost is measured."""
    at_s, for_s = shape.warm_s + draws.uniform(10.0, 30.0), draws.uniform(20.0, 2 * LONE_S)
    node, kind = draws.randrange(shape.nodes), draws.choice(LONE)
    if kind == "flip_memory":
        return _draw_flip(draws, shape, node)
    return SimFault(kind, round(at_s, 3), node=node, rank=0, other=0, for_s=round(for_s, 3))


def _draw_flip(draws: random.Random, shape: Shape, node: int) -> SimFault:
    """Draw a bit flip between two commits.

    A bit that flips between the comparison and the copy, within one step, would be committed undetected.
    """
    commit = draws.randrange(max(1, shape.total_steps // shape.commit_every - 1)) * shape.commit_every
    at_s = draws.uniform(0.0, 0.3) * shape.step_s
    bit, rank = draws.randrange(32), draws.randrange(shape.ranks)
    return SimFault("flip_memory", round(at_s, 3), node=node, rank=rank, other=bit, step=commit + 1)


def draw_no_numbers(draws: random.Random, shape: Shape) -> tuple[SimFault, ...]:
    moments = [draws.uniform(shape.warm_s, shape.span_s) for _ in range(draws.randint(1, 3))]
    return tuple(
        SimFault("nan_loss", round(at_s, 3), node=draws.randrange(shape.nodes), rank=draws.randrange(shape.ranks))
        for at_s in moments
    )


def in_order(faults: list[SimFault]) -> tuple[SimFault, ...]:
    return tuple(sorted(faults, key=lambda fault: (bool(fault.point), fault.at_s)))


def _fault(draws: random.Random, shape: Shape, name: str, at_s: float, nth: int = 0) -> SimFault:
    kind, _, point = name.partition("@")
    for_s = round(draws.choice((0.2, 0.6, 1.5, 4.0)) * shape.ttl_s * draws.uniform(0.5, 1.5) * LONGER.get(kind, 1.0), 3)
    if point:
        return SimFault(kind, round(at_s, 3), point=point, nth=nth, for_s=for_s)
    node, rank = draws.choice([-1, *range(shape.nodes)]), draws.randrange(shape.ranks)
    return SimFault(kind, round(at_s, 3), node=node, rank=rank, other=draws.randrange(shape.nodes), for_s=for_s)


def _with_its_reader(draws: random.Random, shape: Shape, fault: SimFault) -> list[SimFault]:
    """Return a fault; after damage, often followed by the death of all processes, so that the damage is read."""
    if fault.kind not in DAMAGE or draws.random() >= IS_READ:
        return [fault]
    at_s = round(fault.at_s + draws.uniform(0.0, shape.ttl_s), 3)
    return [fault, replace(fault, kind="kill_job", at_s=at_s)]
