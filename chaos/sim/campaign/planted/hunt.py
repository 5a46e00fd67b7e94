"""A planted bug, and the search for a run in which the judge detects it."""

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
    "any-branch-counts": 7,
    "applied-and-pending": 4,
    "applies-too-soon": 9,
    "column-behind": 2,
    "commit-before": 2,
    "device-not-freed": 6,
    "drops-what-may-be-applied": 37,
    "failed-is-the-end": 1,
    "follows-a-part": 9,
    "gathers-an-old-share": 20,
    "given-by-a-dead-branch": 3,
    "head-by-listing": 5,
    "highest-term-wins": 52,
    "hole-found-again": 32,
    "keeps-the-damaged": 34,
    "neighbours-part": 15,
    "no-fence": 13,
    "pending-dropped": 6,
    "seated-too-soon": 91,
    "sealed-behind-the-end": 3,
    "sent-unsettled": 7,
    "skipped-barrier": 86,
    "stale-lanes": 5,
    "sweeps-without-the-name": 8,
    "waits-for-the-dead": 2,
}
"""Index of the case to run first: the first that exposed the bug. Only a shortcut: if the case no longer exposes the
bug, all others follow."""
SHAPE = Shape(nodes=3, ranks=1, lanes=6, rows=(40, 7, 30, 24), epochs=4, commit_every=3)


@dataclass(frozen=True, slots=True)
class SimBug:
    """A bug: description, replaced code, invariants that detect it, and faults that expose it."""

    name: str
    bug: str
    code: Callable[[], Mapping[str, object]]
    invariants: Sequence[str]
    faults: Callable[[random.Random], tuple[SimFault, ...]] | str
    """Function that draws faults, or the name of the saved case in which the bug was found."""
    shape: Shape = field(default=SHAPE)

    def cases(self) -> Iterator[Case]:
        """Yield every case once, the likeliest first."""
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
        """Return the first run that violates one of `invariants` (None without one), and the number of runs."""
        for number, case in enumerate(self.cases(), 1):
            outcome = simulate(case, self.code())
            if any(finding.invariant in self.invariants for finding in outcome.violations):
                return outcome, number
        return None, SEEDS


def near(kept: Case) -> Iterator[Case]:
    """Yield a saved case, then variants with slightly shifted faults: the product's timing may have changed."""
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
