"""A planted bug, and the hunt for a run in which the judge sees it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from chaos.sim.campaign.cases import FOLDER, load
from chaos.sim.campaign.simulate import Case, Outcome, simulate
from chaos.sim.job.fault import SimFault
from chaos.sim.job.shape import Shape

SEEDS = 120
LIKELY: Mapping[str, int] = {
    "any-branch-counts": 3,
    "applied-and-pending": 4,
    "applies-too-soon": 9,
    "commit-before": 2,
    "device-not-freed": 3,
    "drops-what-may-be-applied": 37,
    "failed-is-the-end": 1,
    "gathers-an-old-share": 17,
    "given-by-a-dead-branch": 3,
    "head-by-listing": 5,
    "highest-term-wins": 4,
    "hole-found-again": 63,
    "neighbours-part": 15,
    "no-fence": 13,
    "pending-dropped": 6,
    "seated-too-soon": 23,
    "sent-unsettled": 7,
    "skipped-barrier": 3,
    "stale-lanes": 5,
    "sweeps-without-the-name": 8,
    "waits-for-the-dead": 2,
}
"""The case that is run first, by its place, where the bug was found in none before it. That is only quicker: where
another version of the product brings nothing to light there, all others follow."""
SHAPE = Shape(nodes=3, ranks=1, lanes=6, rows=(40, 7, 30, 24), epochs=4, commit_every=3)


@dataclass(frozen=True, slots=True)
class SimBug:
    """A bug: what is wrong, the code that it replaces, the invariants that see it, and the faults that lead there."""

    name: str
    bug: str
    code: Callable[[], Mapping[str, object]]
    invariants: Sequence[str]
    faults: Callable[[random.Random], tuple[SimFault, ...]] | str
    """What draws faults, or the name of the kept case in which the bug was found."""
    shape: Shape = field(default=SHAPE)

    def cases(self) -> Iterator[Case]:
        """Yield every case once, the likely one first."""
        every = list(self._every_case())
        yield every.pop(LIKELY.get(self.name, 0))
        yield from every

    def _every_case(self) -> Iterator[Case]:
        if isinstance(self.faults, str):
            yield from near(load(FOLDER / f"{self.faults}.yaml"))
            return
        for seed in range(SEEDS):
            yield Case(seed, self.shape, self.faults(random.Random(f"{seed}/{self.name}")))

    def hunt(self) -> tuple[Outcome | None, int]:
        """Return the first run that a named invariant counts against, None if there is none; and how many were run."""
        for number, case in enumerate(self.cases(), 1):
            outcome = simulate(case, self.code())
            if any(finding.invariant in self.invariants for finding in outcome.violations):
                return outcome, number
        return None, SEEDS


def near(kept: Case) -> Iterator[Case]:
    """Yield a kept case, then its like: where the product does a little more, its faults come a little later."""
    yield kept
    for seed in range(SEEDS - 1):
        draws = random.Random(f"{seed}/near")
        faults = [
            replace(fault, nth=fault.nth + draws.randint(-8, 8))
            if fault.nth > 8
            else replace(fault, at_s=fault.at_s * draws.uniform(0.95, 1.05))
            for fault in kept.faults
        ]
        yield replace(kept, seed=kept.seed + seed, faults=tuple(faults))
