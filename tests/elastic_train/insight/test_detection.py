"""The detector: who is slow, in which phase, and what else is wrong; and that it holds its tongue otherwise.

In simulated rows of synchronous steps, every rank's phases have a mean, noise and rare hiccups. In two of three cases,
one rank becomes slow at some step, in its lanes, its data, or its link; ranks that are ready early wait for the last.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

from elastic_train.insight.detection import LATENCY, Detector, Event, Kind, _beside_others
from elastic_train.insight.phases import RankFacts
from rendezvous.etcd.tally import Answers

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


QUIET = RankFacts(0.01, 0.0, 0.3, 0.6, 0.0, 0.2, 0.05, 0.0, 0.0, 0.0, 0, 0.0003)
Change = Callable[[int, int], RankFacts]


def watched(change: Change, steps: int = 120, ranks: int = 4) -> Iterator[Event]:
    """Yield the events of ranks that are quiet but for a change of (step, rank)."""
    detector, draws = Detector([1] * ranks), random.Random(7)
    for step in range(1, steps + 1):
        rows = [change(step, rank) for rank in range(ranks)]
        noisy = [row._replace(forward_s=row.forward_s * draws.uniform(0.97, 1.03)) for row in rows]
        yield from detector.step(step, noisy, 2.0 + draws.uniform(-0.1, 0.1), 1.0)


def kinds(change: Change, steps: int = 120, ranks: int = 4) -> list[tuple[str, int | None]]:
    return [(event.kind, event.rank) for event in watched(change, steps, ranks) if not event.is_over]


def test_a_quiet_run_and_one_with_hiccups_say_nothing() -> None:
    """A step of a rank that takes ten times as long now and then is no slow rank."""
    assert kinds(lambda step, rank: QUIET) == []
    assert kinds(lambda step, rank: QUIET._replace(backward_s=6.0) if (step + 7 * rank) % 15 == 0 else QUIET) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [({"backward_s": 1.2}, "slow_compute"), ({"data_s": 0.4}, "slow_data"), ({"round_trip_s": 0.02}, "slow_link")],
)
def test_a_slow_rank_is_named_with_its_phase_and_no_other(change: dict[str, float], expected: str) -> None:
    """And by when it began; what it makes the others wait is theirs by no fault of their own."""

    def slow(step: int, rank: int) -> RankFacts:
        return QUIET._replace(**change) if rank == 2 and step > 60 else QUIET

    (event,) = watched(slow)
    assert (event.kind, event.rank) == (expected, 2)
    assert 60 < event.step <= 60 + LATENCY and 50 <= event.since <= 65
    assert event.value > event.usual > 0
    assert "rank 2 on h2:" in event.render("h2") and f"since step {event.since}" in event.render()


def test_a_rank_with_more_lanes_is_no_slow_one() -> None:
    """Five lanes over four ranks: one has two, and takes twice as long; it is slow if it takes longer than that."""
    for seconds, expected in ((1.2, []), (2.4, ["slow_compute"])):
        detector, said = Detector([1, 1, 1, 2]), list[Event]()
        for step in range(1, 60):
            said += detector.step(step, [*[QUIET] * 3, QUIET._replace(forward_s=0.6, backward_s=seconds)], 1.0, 1.0)
        assert [event.kind for event in said] == expected


def test_ranks_of_one_stage_are_compared_and_stages_are_not() -> None:
    """Of three cells of two stages the last stages take longer; one of the first ones is slow beside its like."""
    for seconds, expected in ((0.2, []), (0.6, [("slow_compute", 2)])):
        detector, said = Detector([1] * 6, [[0, 2, 4], [1, 3, 5]]), list[Event]()
        fast, slow = QUIET._replace(forward_s=0.1, backward_s=0.2), QUIET._replace(forward_s=0.3, backward_s=0.6)
        for step in range(1, 60):
            row = [fast, slow, fast._replace(backward_s=seconds), slow, fast, slow]
            said += detector.step(step, row, 1.0, 1.0)
        assert [(event.kind, event.rank) for event in said] == expected


def test_what_is_over_is_said_to_be_once() -> None:
    begins, ends = watched(lambda s, rank: QUIET._replace(backward_s=1.5) if rank == 1 and 40 < s <= 70 else QUIET)
    assert (begins.kind, begins.rank, begins.is_over) == ("slow_compute", 1, False)
    assert (ends.kind, ends.rank, ends.is_over, ends.since) == ("slow_compute", 1, True, begins.since)
    assert 70 < ends.step <= 70 + LATENCY


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_network_that_is_slower_than_it_was_is_no_ranks(ranks: int) -> None:
    """Each end of the only connection of two ranks measures the same, and of more than two most are slower."""

    def slow(step: int, rank: int) -> RankFacts:
        return QUIET._replace(round_trip_s=0.02, exchange_s=1.5) if step > 60 else QUIET

    assert kinds(slow, ranks=ranks) == [("slow_steps", None), ("slow_network", None)]


def test_a_network_that_costs_little_of_a_step_or_was_ever_slow_is_not_said_to_be_slower() -> None:
    def idle(step: int, rank: int) -> RankFacts:
        return QUIET._replace(round_trip_s=0.02 if step > 60 else QUIET.round_trip_s, exchange_s=0.1)

    assert kinds(idle, ranks=2) == []
    assert kinds(lambda step, rank: QUIET._replace(round_trip_s=0.05), ranks=2) == []


@pytest.mark.parametrize(
    ("each", "said"),
    [
        (Answers(1, 0.003, 0), []),
        (Answers(1, 0.003, 1), []),
        (Answers(1, 0.8, 0), [("slow_etcd", False, 0.8), ("slow_etcd", True, 0.0)]),
        (Answers(0, 0.0, 1), [("silent_etcd", False, 100.0), ("silent_etcd", True, 0.0)]),
    ],
)
def test_an_etcd_that_is_slow_or_silent_is_said_to_be_until_it_answers(
    each: Answers, said: list[tuple[str, bool, float]]
) -> None:
    """What rank 0's process asks of it while steps go on; what it asked in worlds before this one is none of its."""
    detector, events, now = Detector([1, 1]), list[Event](), Answers(7, 900.0, 50)
    for step in range(1, 200):
        asked = each if 30 <= step < 90 else Answers(1, 0.003, 0)
        now = Answers(*(sum(two) for two in zip(now, asked, strict=True)))
        events += detector.step(step, [QUIET, QUIET], 1.0, 1.0, 0, now)
    assert [(event.kind, event.is_over, pytest.approx(event.value)) for event in events] == said
    assert all(event.rank is None and 26 <= event.since <= 31 for event in events)
    assert all(90 <= event.step <= 94 if event.is_over else 38 <= event.step <= 42 for event in events)


def test_a_burst_of_failures_is_no_silent_etcd() -> None:
    """An election answers nobody for a second or two, and is over before it is said."""
    detector, events, now = Detector([1, 1]), list[Event](), Answers(0, 0.0, 0)
    for step in range(1, 300):
        asked = Answers(0, 0.0, 7) if step == 50 else Answers(1, 0.003, 0) if step % 20 == 0 else Answers()
        now = Answers(*(sum(two) for two in zip(now, asked, strict=True)))
        events += detector.step(step, [QUIET, QUIET], 1.0, 1.0, 0, now)
    assert events == []


def test_a_slow_link_is_named_whatever_busy_peers_hold_back() -> None:
    """Acknowledgements that busy peers hold back lengthen every second round trip of the others, and some in a row."""

    def slow(step: int, rank: int) -> RankFacts:
        if rank == 2:
            return QUIET._replace(round_trip_s=0.012 if step > 60 else QUIET.round_trip_s)
        is_held = step % 2 == rank % 2 or step % 10 < 3
        return QUIET._replace(round_trip_s=0.008 if is_held else QUIET.round_trip_s)

    (event,) = watched(slow)
    assert (event.kind, event.rank) == ("slow_link", 2)
    assert 60 < event.step <= 60 + LATENCY and 61 <= event.since <= 65


def test_a_link_that_is_quick_now_and_then_is_not_slow() -> None:
    """One round trip in ten as short as the others' is one that no slow link has."""

    def held(step: int, rank: int) -> RankFacts:
        return QUIET._replace(round_trip_s=0.02) if rank == 2 and step % 10 else QUIET

    assert kinds(held) == []


@pytest.mark.parametrize(("phase", "kind"), [("data_s", "data_wait"), ("save_s", "save_stall")])
def test_what_all_ranks_wait_for_is_said_of_none(phase: str, kind: str) -> None:
    assert kinds(lambda step, rank: QUIET._replace(**{phase: 0.4})) == [(kind, None)]


def test_losses_and_norms_are_judged_by_the_steps_before() -> None:
    """A spike is one at once; a loss that falls, or is noisy, is none. Failed saves count by the run of them."""
    detector = Detector([1])
    events = []
    for step in range(1, 40):
        falling = 4.0 - step / 20
        loss, norm = (9.0, 30.0) if step == 30 else (falling, 1.0 + step % 3)
        loss = float("nan") if step == 35 else loss
        failed = 2 if step >= 37 else 1 if step >= 33 else 0
        events += detector.step(step, [QUIET], loss, norm, failed)
    said = [(event.kind, event.step) for event in events]
    expected = [
        ("loss_spike", 30),
        ("gradient_spike", 30),
        ("failed_saves", 33),
        ("nonfinite", 35),
        ("failed_saves", 37),
    ]
    assert said == expected


@pytest.mark.heavy
@pytest.mark.parametrize("begin", [4.0, 1e-6])
def test_a_run_that_has_converged_to_nothing_has_no_endless_spikes(begin: float) -> None:
    """Its losses and norms near zero vary by powers of ten; what is large beside its first losses is still a spike.

    A world that begins when it has converged says a few, and no more of that size; a larger one is said.
    """
    draws = np.random.default_rng(7).standard_cauchy((6000, 2))
    detector, said = Detector([1]), list[tuple[str, int]]()
    for step in range(1, 6001):
        level = 1e-6 + begin * 0.98**step
        loss, norm = (level * (1 + min(100.0, abs(float(draw)) ** 1.5)) for draw in draws[step - 1])
        loss, norm = (1.0, 10.0) if step == 5000 else (loss, norm)
        said += [(event.kind, event.step) for event in detector.step(step, [QUIET], loss, norm)]
    assert {("loss_spike", 5000), ("gradient_spike", 5000)} <= set(said)
    assert len(said) - 2 <= (6 if begin == 4.0 else 2 * 6 * 6)


def separated(num_steps: int) -> list[float]:
    """Return the losses of a logistic regression on rows that a plane separates, by SGD with eight rows a step."""
    draws = np.random.default_rng(7)
    rows = draws.normal(size=(2000, 8))
    side = rows @ np.arange(1, 9)
    rows, signs = rows[abs(side) > 1], np.sign(side[abs(side) > 1])
    weights, losses = np.zeros(8), list[float]()
    for _ in range(num_steps):
        chosen = draws.integers(0, len(rows), 8)
        margins = signs[chosen] * (rows[chosen] @ weights)
        losses.append(float(np.logaddexp(0, -margins).mean()))
        weights += 8 * (rows[chosen] * (signs[chosen] / (1 + np.exp(margins)))[:, None]).mean(axis=0)
    return losses


@pytest.mark.heavy
@pytest.mark.parametrize("begin", [1000, 2000])
def test_a_world_that_resumes_a_converged_run_reports_no_loss_that_stays_tiny(begin: int) -> None:
    """Its losses are around 0.001, and a hard sample makes one of them 0.04; a loss of 0.5 is still a spike."""
    losses, detector, said = separated(3000), Detector([1]), list[tuple[str, int]]()
    assert np.median(losses[begin:]) < 0.01 < max(losses[begin:])
    losses[2900] = 0.5
    for step, loss in enumerate(losses[begin:], start=begin):
        said += [(event.kind, event.step) for event in detector.step(step, [QUIET], loss, 1.0)]
    assert said == [("loss_spike", 2900)]


def test_a_search_for_the_scale_of_fp16_is_no_event_and_no_history() -> None:
    """Its loss is one as any other; a norm that is no number comes neither before nor among those that are."""
    detector, events = Detector([1]), list[Event]()
    for step in range(1, 60):
        is_search = step < 3 or step % 9 == 0
        norm = None if is_search else 30.0 if step == 50 else 1.0
        events += detector.step(step, [QUIET], 9.0 if step == 54 else 2.0, norm)
    assert [(event.kind, event.step) for event in events] == [("gradient_spike", 50), ("loss_spike", 54)]


@pytest.mark.heavy
@pytest.mark.parametrize("num_cases", [12, pytest.param(100, marks=pytest.mark.hunt)])
def test_precision_recall_and_latency_over_drawn_cases(num_cases: int) -> None:
    figures = figures_of(range(num_cases))
    assert figures.precision >= 0.95 and figures.recall >= 0.95 and figures.latency_steps <= 30


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7, 8])
def test_the_others_median_is_that_of_all_but_one(num_ranks: int) -> None:
    """Also where several are equal."""
    draws = random.Random(num_ranks)
    values = np.array([float(draws.randint(1, 5)) for _ in range(num_ranks)])
    expected = [(rank, values[rank], float(np.median(np.delete(values, rank)))) for rank in range(num_ranks)]
    assert sorted(_beside_others(values)) == expected


@pytest.mark.parametrize(("step_s", "is_said"), [(0.004, False), (0.1, True)])
def test_milliseconds_of_a_busy_machine_are_no_event(step_s: float, is_said: bool) -> None:
    """A rank that computes for half as long again is slow only if that costs more than the floor in seconds."""
    detector, found = Detector([1, 1, 1]), []
    for step in range(1, 41):
        rows = [
            RankFacts(**{**dict.fromkeys(RankFacts._fields, 0.0), "forward_s": step_s * (1.5 if rank == 1 else 1.0)})
            for rank in range(3)
        ]
        found += detector.step(step, rows, 1.0, 1.0)
    assert [event.kind for event in found] == (["slow_compute"] if is_said else [])
