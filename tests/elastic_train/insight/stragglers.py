"""Check that the detector names only the slow rank, on simulated rows of the ranks of synchronous steps.

Every rank's phases have a mean, noise and rare hiccups. In two of three cases, one rank becomes slow at some step, in
its lanes, its data, or its link. Ranks that are ready early wait for the last one, as in the product. A case is right
if the first report about a rank names the slow one and its kind of slowness, after it began; without slowness, there
must be no report.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from elastic_train.insight.detection import Detector
from elastic_train.insight.events import Event, Kind
from elastic_train.insight.phases import RankFacts

STEPS = 150
MOST_HELD, MOST_HELD_STEPS, HELD_S = 0.03, 8, (0.001, 0.01)
OF_RANKS: tuple[Kind, ...] = ("slow_compute", "slow_data", "slow_link")


@dataclass(frozen=True, slots=True)
class Case:
    """A job whose `rank` is slow by `factor` from step `begins` on, in one way; None if nothing is slow."""

    num_ranks: int
    step_s: float
    noise: float
    hiccups: float
    kind: Kind | None
    rank: int
    factor: float
    begins: int
    held: float
    """Fraction of steps at which a rank's peers start to delay their acknowledgements for a few steps."""


def drawn(seed: int) -> Case:
    """Draw a case; a slowness costs a step 15 % or more."""
    draws = random.Random(f"straggler/{seed}")
    kind = draws.choice([None, *OF_RANKS]) if seed % 3 else None
    num_ranks = draws.randint(3 if kind == "slow_link" else 2, 16)
    return Case(
        num_ranks,
        10 ** draws.uniform(-2, 1),
        draws.uniform(0.01, 0.08),
        draws.uniform(0.0, 0.02),
        kind,
        draws.randrange(num_ranks),
        draws.uniform(1.5, 4.0),
        draws.randint(30, 90),
        draws.uniform(0.0, MOST_HELD),
    )


def rows(case: Case, seed: int) -> Iterator[list[RankFacts]]:
    """Yield the rows of every step."""
    draws = random.Random(f"rows/{seed}")
    held = [_held(case, random.Random(f"held/{seed}/{rank}")) for rank in range(case.num_ranks)]
    for step in range(STEPS):
        slow = case.rank if case.kind is not None and step >= case.begins else None
        one = [_of(case, rank == slow, draws) for rank in range(case.num_ranks)]
        one = [
            facts._replace(round_trip_s=facts.round_trip_s + next(late)) for facts, late in zip(one, held, strict=True)
        ]
        last_s = max(facts.data_s + facts.compute_s for facts in one)
        yield [facts._replace(wait_s=last_s - facts.data_s - facts.compute_s) for facts in one]


def _held(case: Case, draws: random.Random) -> Iterator[float]:
    """Yield the extra seconds of a rank's shortest round trip per step, from busy peers that answer late."""
    while True:
        if draws.random() < case.held:
            yield from [draws.uniform(*HELD_S)] * draws.randint(1, MOST_HELD_STEPS)
        yield 0.0


def _of(case: Case, is_slow: bool, draws: random.Random) -> RankFacts:
    def around(seconds: float) -> float:
        hiccup = draws.uniform(2.0, 10.0) if draws.random() < case.hiccups else 1.0
        return seconds * draws.lognormvariate(0.0, case.noise) * hiccup

    compute_s, data_s = around(0.7 * case.step_s), around(0.02 * case.step_s)
    exchange_s, trip_s = around(0.2 * case.step_s), around(0.0003)
    if is_slow and case.kind == "slow_compute":
        compute_s *= case.factor
    if is_slow and case.kind == "slow_data":
        data_s += (case.factor - 1.0) * 0.7 * case.step_s
    if is_slow and case.kind == "slow_link":
        exchange_s, trip_s = exchange_s * case.factor, trip_s + 0.005 * case.factor
    return RankFacts(data_s, 0.0, compute_s / 3, compute_s * 2 / 3, 0.0, exchange_s, 0.0, 0.0, 0.0, 0.0, 0, trip_s)


def said(case: Case, seed: int) -> list[Event]:
    """Return the detector's reports about ranks."""
    detector, found = Detector([1] * case.num_ranks), list[Event]()
    for step, ranks in enumerate(rows(case, seed)):
        found += [event for event in detector.step(step, ranks, 1.0, 1.0) if event.rank is not None]
    return [event for event in found if not event.is_over]


class Figures(NamedTuple):
    """Precision and recall over some cases, and the most steps until a slow rank was named."""

    precision: float
    recall: float
    latency_steps: int


def figures_of(seeds: range) -> Figures:
    """Judge the detector on drawn cases."""
    right = wrong = slow = 0
    latencies = [0]
    for seed in seeds:
        case = drawn(seed)
        events = said(case, seed)
        slow += case.kind is not None
        good = [e for e in events if (e.kind, e.rank) == (case.kind, case.rank) and e.step >= case.begins]
        right += bool(good)
        wrong += len(events) - len(good)
        latencies += [good[0].step - case.begins] if good else []
    return Figures(right / max(1, right + wrong), right / max(1, slow), max(latencies))
