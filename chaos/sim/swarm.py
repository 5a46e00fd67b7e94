"""Draws a run's faults from a seed.

Each seed draws first which kinds exist in its run at all, then how many of them (swarm testing: Groce, Zhang, Eide,
Chen, Regehr: Swarm Testing, ISSTA 2012): a run with three kinds of fault goes to places where one with all never does.
"""

from __future__ import annotations

import random
from dataclasses import replace

from chaos.sim.faults import AT_POINTS, POINTS, SimFault
from chaos.sim.kinds import KINDS
from chaos.sim.shape import Shape

IN_RECOVERY = 0.25
"""How many of the faults come within one lease of the one before: while its damage is still being mended."""


def draw(draws: random.Random, shape: Shape, most: int) -> tuple[SimFault, ...]:
    """Draw a run's faults, at most so many, in the order of time; those at failpoints come last."""
    names = [*KINDS, *(f"{how}@{point}" for how in AT_POINTS for point in POINTS)]
    chosen = draws.sample(names, draws.randint(1, 6))
    faults = []
    for _ in range(draws.randint(1, most)):
        name = draws.choice(chosen)
        kind, _, point = name.partition("@")
        where = {
            "node": draws.choice([-1, *range(shape.nodes)]),
            "rank": draws.randrange(shape.ranks),
            "other": draws.randrange(shape.nodes),
            "for_s": round(draws.choice((0.2, 0.6, 1.5, 4.0)) * shape.ttl_s * draws.uniform(0.5, 1.5), 3),
        }
        if point:
            faults.append(SimFault(kind, point=point, nth=draws.randint(1, 4 * most), for_s=where["for_s"]))
        else:
            faults.append(SimFault(kind, at_s=round(draws.uniform(0.0, 1.5 * shape.span_s), 3), **where))
            if len(faults) > 1 and draws.random() < IN_RECOVERY:
                last_s = faults[-2].at_s
                faults[-1] = replace(faults[-1], at_s=round(last_s + draws.uniform(0.0, shape.ttl_s), 3))
    return tuple(sorted(faults, key=lambda fault: (bool(fault.point), fault.at_s)))
