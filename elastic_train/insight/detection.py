"""Events with evidence: slow ranks, by phase, and other problems, from windows of all ranks' measurements.

Pure, with robust statistics: a rank is compared with the median of the others over a window without its worst steps, so
that single hiccups do not count. A windowed condition must hold for `LOOKS` consecutive looks before it is reported,
and be absent for as many before it is over; so it is reported within `LATENCY` steps. Two ranks have no majority, but
the slow one is the one that computes while the other waits. Link problems need three ranks: with two, both have the
same link.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastic_train.config.monitoring import EventKind as Kind
from elastic_train.insight.phases import PHASES, RankFacts
from rendezvous.etcd.tally import Answers

WINDOW, LOOK_EVERY, LOOKS = 10, 5, 3
LATENCY = WINDOW + LOOK_EVERY * LOOKS
"""Most steps from the first bad one until the report."""
WORST = 2
"""Steps of a window that are ignored: those in which a rank took longest."""
SLOW_RATIO, SLOW_SHARE = 1.3, 0.1
"""A rank is slow at this multiple of the others' median, if the difference is also this share of a step."""
SLOW_LEAST_S = 0.01
"""Smaller differences in seconds per step are due to a busy machine. Equals `SLOW_SHARE` of a 100 ms step."""
LINK_RATIO, LINK_LEAST_S, LINK_SHARE = 3.0, 0.002, 0.15
"""A link is slow at this multiple of the others' round trip, this many seconds longer, if the exchange is this share of
a step. The shortest round trip of a window counts: a busy peer delays several in a row, a slow link all of them."""
STEPS_RATIO, BASELINE_LOOKS, MOST_LOOKS = 1.4, 6, 200
"""Steps are slow at this multiple of the best quartile of earlier looks, of which at least `BASELINE_LOOKS` are needed.
The same holds for all ranks' round trips together, at `LINK_RATIO`."""
ETCD_REQUESTS, ETCD_S, ETCD_SHARE = 4, 0.5, 0.5
"""Requests are judged in batches of this size: etcd is slow if answers take this long, silent if more than this share
gets none, in `LOOKS` batches in a row."""
DATA_SHARE, SAVE_SHARE, SAVE_WINDOW = 0.2, 0.1, 50
SPIKE_HISTORY, SPIKE_LEAST, SPIKE_DEVIATIONS, NORM_RATIO = 64, 16, 10.0, 10.0
SPIKE_FLOOR, SPIKE_MEMORY, MOST_SPIKES = 0.01, 1000, 3
"""A value is no spike if it exceeds the usual by less than this share of a world's first values, since a loss near zero
is all noise; nor after `MOST_SPIKES` others, at least half as large, within this many steps: a heavy tail."""
TINY_LOSS = 0.01
"""A loss below this is a few hard samples away from ten times as much, also in a world whose first losses are as small:
it has to rise by more than this, and above ten times this."""
_MAD_TO_SIGMA = 1.4826
_COMPUTE = (RankFacts._fields.index("forward_s"), RankFacts._fields.index("backward_s"))
_DATA, _SAVE = RankFacts._fields.index("data_s"), RankFacts._fields.index("save_s")
_WAIT, _EXCHANGE = RankFacts._fields.index("wait_s"), RankFacts._fields.index("exchange_s")
_TRIP = RankFacts._fields.index("round_trip_s")

LINE_EVERY_S = 60.0

MEANINGS: dict[Kind, str] = {
    "slow_compute": "a rank computes for longer than the others",
    "slow_data": "a rank waits for its samples for longer than the others",
    "slow_link": "a rank's connections are slower than the others', and the exchange is a good part of a step",
    "slow_steps": "steps take longer than they did in this world",
    "slow_network": "round trips between ranks take longer than they did in this world",
    "slow_etcd": "etcd takes long to answer",
    "silent_etcd": "etcd leaves most requests without an answer",
    "data_wait": "a good part of all ranks' time goes into waiting for samples",
    "save_stall": "a good part of the time goes into waiting for saves",
    "failed_saves": "commits have failed since the last one that succeeded",
    "loss_spike": "the loss is far above that of the steps before",
    "gradient_spike": "the gradient's norm is many times that of the steps before",
    "nonfinite": "loss or gradient is not a number",
    "wrong_gradient": "a rank's gradient of a lane is not the one that others compute",
}


@dataclass(frozen=True, slots=True)
class Event:
    """Something goes wrong, or with `is_over` is right again.

    Seen after `step`, true since step `since`. `rank` is the affected rank, None for all. `value` is the measurement,
    `usual` its reference, in `unit`. `lane` and its `samples` are those of an audit.
    """

    kind: Kind
    step: int
    since: int
    rank: int | None
    value: float
    usual: float
    unit: str
    is_over: bool = False
    lane: int | None = None
    samples: tuple[int, ...] = ()

    def render(self, host: str | None = None) -> str:
        who = "" if self.rank is None else f" rank {self.rank}{f' on {host}' if host else ''}:"
        if self.is_over:
            return f"resolved after step {self.step}, since step {self.since}:{who} {MEANINGS[self.kind]}"
        measured = f"{self.value:.3g}{self.unit} against {self.usual:.3g}{self.unit}"
        if self.lane is not None:
            measured += f", lane {self.lane}, samples {', '.join(map(str, self.samples))}"
        return f"after step {self.step}:{who} {MEANINGS[self.kind]}: {measured}, since step {self.since}"


@dataclass(slots=True)
class _Held:
    """Events of a kind since its last log line."""

    line_at: float
    events: list[tuple[Event, str]]


class EventLines:
    """Log lines for events: one per kind in `LINE_EVERY_S` seconds, which counts those held back."""

    def __init__(self) -> None:
        self._held: dict[Kind, _Held] = {}

    def add(self, event: Event, text: str, now: float, *, is_urgent: bool = False) -> str | None:
        """Return the line of an event, None if it is held back; urgent ones are logged at once."""
        held = self._held.get(event.kind)
        if held is not None and not is_urgent and now - held.line_at < LINE_EVERY_S:
            held.events.append((event, text))
            return None
        before = [] if held is None else held.events
        self._held[event.kind] = _Held(now, [])
        return f"EVENT {event.kind}: {text}{_counted(before)}"

    def due(self, now: float) -> Iterator[str]:
        """Yield a line for each kind whose last line is old enough, with the last event held back."""
        for kind, held in self._held.items():
            if held.events and now - held.line_at >= LINE_EVERY_S:
                *before, (_, text) = held.events
                held.line_at, held.events = now, []
                yield f"EVENT {kind}: {text}{_counted(before)}"


Key = tuple[Kind, int | None]
Found = tuple[Key, float, float, str]
"""Problem, measured value, reference value, and their unit."""


def _counted(held: list[tuple[Event, str]]) -> str:
    if not held:
        return ""
    ranks = sorted({event.rank for event, _ in held if event.rank is not None})
    of_ranks = f" of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
    return f" ({len(held)} more since the last line{of_ranks}: see the history)"


@dataclass(slots=True)
class _Standing:
    """State of a problem: consecutive looks with and without it, its first step, and whether it was reported."""

    since: int
    num_found: int = 0
    num_missed: int = 0
    is_said: bool = False


class _Spikes:
    """Spike detection in one number, step by step."""

    def __init__(self, is_far: Callable[[float, float, deque[float]], bool]) -> None:
        self._is_far = is_far
        """Arguments: value, median before it, values before it."""
        self._values: deque[float] = deque(maxlen=SPIKE_HISTORY)
        self._floor: float | None = None
        self._far: deque[tuple[int, float]] = deque(maxlen=SPIKE_HISTORY)

    def usual_before(self, step: int, value: float) -> float | None:
        """Take a step's value; return the median of the earlier ones if it is a spike, else None."""
        before = self._values
        usual = statistics.median(before) if len(before) >= SPIKE_LEAST else None
        if usual is not None and self._floor is None:
            self._floor = SPIKE_FLOOR * statistics.median(map(abs, before))
        is_spike = (
            usual is not None
            and self._floor is not None
            and value - usual > self._floor
            and self._is_far(value, usual, before)
            and not self._is_frequent(step, value - usual)
        )
        before.append(value)
        return usual if is_spike else None

    def _is_frequent(self, step: int, excess: float) -> bool:
        """Record a large value; return True if there were so many recently that they are usual."""
        num = sum(at > step - SPIKE_MEMORY and 2 * before >= excess for at, before in self._far)
        self._far.append((step, excess))
        return num >= MOST_SPIKES


def _is_far_loss(value: float, usual: float, before: deque[float]) -> bool:
    if value <= usual + 0.5 * abs(usual):  # otherwise the deviation is not needed
        return False
    if value - usual <= TINY_LOSS or (abs(usual) < TINY_LOSS and value <= 10 * TINY_LOSS):
        return False
    return value > usual + SPIKE_DEVIATIONS * _MAD_TO_SIGMA * statistics.median(abs(each - usual) for each in before)


def _is_far_norm(value: float, usual: float, before: deque[float]) -> bool:
    return value > NORM_RATIO * usual > 0


class Detector:
    """The steps of one world, in order; `num_lanes` is the constant number of lanes per rank.

    `alike` are groups of ranks that compute the same for their lanes; all ranks by default.
    """

    def __init__(self, num_lanes: Sequence[int], alike: Sequence[Sequence[int]] = ()) -> None:
        self._alike = alike or [range(len(num_lanes))]
        self._lanes = np.array(num_lanes, dtype=np.float64) / max(1.0, float(np.median(num_lanes)))
        self._rows: deque[npt.NDArray[np.float64]] = deque(maxlen=WINDOW)
        self._standing: dict[Key, _Standing] = {}
        self._looks: deque[float] = deque(maxlen=MOST_LOOKS)
        self._trips: deque[float] = deque(maxlen=MOST_LOOKS)
        self._etcd: tuple[int, Answers] | None = None
        """Start of the current batch of requests."""
        self._etcd_standing: tuple[Kind, _Standing] | None = None
        self._losses, self._norms = _Spikes(_is_far_loss), _Spikes(_is_far_norm)
        self._saves: deque[tuple[float, float]] = deque(maxlen=SAVE_WINDOW)
        self._num_failed = 0
        self._num_steps = 0

    def step(
        self,
        step: int,
        ranks: Sequence[RankFacts],
        loss: float | None,
        norm: float | None,
        num_failed_saves: int = 0,
        etcd: Answers | None = None,
    ) -> list[Event]:
        """Return the problems that begin and end with a step; `loss` is the mean, None without a target, and
        `num_failed_saves` counts consecutive ones.

        There is no `norm` while an fp16 scaler searches for its scale. `etcd` counts all of this process's requests so
        far.
        """
        rows = np.array(ranks)
        self._rows.append(rows)
        self._saves.append((float(rows[:, _SAVE].max()), float(rows[0, : len(PHASES)].sum())))
        self._num_steps += 1
        events = [*self._numbers(step, loss, norm), *self._failed(step, num_failed_saves)]
        if etcd is not None:
            events += self._judge_etcd(step, etcd)
        if len(self._rows) == WINDOW and self._num_steps % LOOK_EVERY == 0:
            events += self._look(step)
        return events

    def _look(self, step: int) -> Iterator[Event]:
        window = np.stack(self._rows)
        step_s = float(np.median(window[:, :, : len(PHASES)].sum(axis=2)))
        found = {
            event[0]: event[1:]
            for event in (
                *_slow_ranks(window, step_s, self._lanes, self._alike),
                *self._of_all(window, step_s),
                *self._slow_network(window, step_s),
            )
        }
        for key, (value, usual, unit) in found.items():
            standing = self._standing.setdefault(key, _Standing(max(1, step - WINDOW + 1)))
            standing.num_found, standing.num_missed = standing.num_found + 1, 0
            if standing.num_found == LOOKS:
                standing.is_said = True
                yield Event(key[0], step, standing.since, key[1], value, usual, unit)
        for key in [key for key in self._standing if key not in found]:
            standing = self._standing[key]
            standing.num_missed += 1
            if not standing.is_said or standing.num_missed == LOOKS:
                del self._standing[key]
                if standing.is_said:
                    yield Event(key[0], step, standing.since, key[1], 0.0, 0.0, "", is_over=True)

    def _of_all(self, window: npt.NDArray[np.float64], step_s: float) -> Iterator[Found]:
        """Find problems of all ranks: steps, data and saves."""
        usual = self._usual("slow_steps", self._looks, step_s)
        if step_s > STEPS_RATIO * usual and step_s - usual > SLOW_LEAST_S:
            yield ("slow_steps", None), step_s, usual, " s"
        waiting = float(np.median(_without_worst(window[:, :, _DATA])))
        if waiting > max(DATA_SHARE * step_s, SLOW_LEAST_S):
            yield ("data_wait", None), 100 * waiting / step_s, 100 * DATA_SHARE, " %"
        if len(self._saves) == SAVE_WINDOW:
            stalled, whole = (sum(column) for column in zip(*self._saves, strict=True))
            if stalled > SAVE_SHARE * whole:
                yield ("save_stall", None), 100 * stalled / whole, 100 * SAVE_SHARE, " %"

    def _slow_network(self, window: npt.NDArray[np.float64], step_s: float) -> Iterator[Found]:
        """Find out whether most ranks' connections have become slower; two ranks have only one."""
        if window.shape[1] < 2:
            return
        trip_s = float(np.median(window[:, :, _TRIP].min(axis=0)))
        usual = self._usual("slow_network", self._trips, trip_s)
        is_long = trip_s > LINK_RATIO * usual > 0 and trip_s - usual > LINK_LEAST_S
        if is_long and _exchange_s(window) > LINK_SHARE * step_s:
            yield ("slow_network", None), 1e3 * trip_s, 1e3 * usual, " ms"

    def _usual(self, kind: Kind, looks: deque[float], value: float) -> float:
        """Return the best quartile of earlier looks, infinity while they are few; unreported values join them."""
        usual = float(np.quantile(looks, 0.25)) if len(looks) >= BASELINE_LOOKS else math.inf
        if len(looks) < BASELINE_LOOKS or (kind, None) not in self._standing:
            looks.append(value)
        return usual

    def _judge_etcd(self, step: int, etcd: Answers) -> Iterator[Event]:
        """Judge this world's last requests once they are a batch; a few failures, as in an election, do not count."""
        began, before = self._etcd = self._etcd or (step, etcd)
        answers, failures = etcd.num_answers - before.num_answers, etcd.num_failures - before.num_failures
        if answers + failures < ETCD_REQUESTS:
            return
        self._etcd = (step, etcd)
        seconds, share = (etcd.answer_s - before.answer_s) / max(1, answers), failures / (answers + failures)
        kind: Kind | None = "silent_etcd" if share > ETCD_SHARE else "slow_etcd" if seconds > ETCD_S else None
        if self._etcd_standing is not None and self._etcd_standing[0] != kind:
            (was, standing), self._etcd_standing = self._etcd_standing, None
            if standing.is_said:
                yield Event(was, step, standing.since, None, 0.0, 0.0, "", is_over=True)
        if kind is None:
            return
        _, standing = self._etcd_standing = self._etcd_standing or (kind, _Standing(began + 1))
        standing.num_found += 1
        if standing.num_found == LOOKS:
            standing.is_said = True
            measured = (100 * share, 100 * ETCD_SHARE, " %") if kind == "silent_etcd" else (seconds, ETCD_S, " s")
            yield Event(kind, step, standing.since, None, *measured)

    def _numbers(self, step: int, loss: float | None, norm: float | None) -> Iterator[Event]:
        """Judge a step's loss and norm by earlier ones."""
        wrong = [value for value in (loss, norm) if value is not None and not math.isfinite(value)]
        if wrong:
            yield Event("nonfinite", step, step, None, wrong[0], 0.0, "")
        if wrong or loss is None:
            return
        if (usual := self._losses.usual_before(step, loss)) is not None:
            yield Event("loss_spike", step, step, None, loss, usual, "")
        if norm is not None and (usual := self._norms.usual_before(step, norm)) is not None:
            yield Event("gradient_spike", step, step, None, norm, usual, "")

    def _failed(self, step: int, num_failed: int) -> Iterator[Event]:
        before, self._num_failed = self._num_failed, num_failed
        if num_failed > before:
            yield Event("failed_saves", step, step, None, float(num_failed), 0.0, "")


def _slow_ranks(
    window: npt.NDArray[np.float64],
    step_s: float,
    lanes: npt.NDArray[np.float64],
    alike: Sequence[Sequence[int]],
) -> Iterator[Found]:
    """Find the ranks whose compute per lane, data or link is slower than the others'."""
    if window.shape[1] < 2:
        return
    compute = _without_worst(window[:, :, _COMPUTE].sum(axis=2)) / np.maximum(lanes, 1e-9)
    data = _without_worst(window[:, :, _DATA])
    everyone = [range(window.shape[1])]
    for kind, values, groups in (("slow_compute", compute, alike), ("slow_data", data, everyone)):
        for rank, value, usual in _beside_alike(values, groups):
            if value > SLOW_RATIO * usual and value - usual > max(SLOW_SHARE * step_s, SLOW_LEAST_S):
                yield (kind, rank), value, usual, " s"  # type: ignore[misc]
    if window.shape[1] > 2 and _exchange_s(window) > LINK_SHARE * step_s:
        for rank, value, usual in _beside_others(window[:, :, _TRIP].min(axis=0)):
            if usual > 0 and value > LINK_RATIO * usual and value - usual > LINK_LEAST_S:
                yield ("slow_link", rank), 1e3 * value, 1e3 * usual, " ms"


def _exchange_s(window: npt.NDArray[np.float64]) -> float:
    """Return the median time per step that ranks exchange, or wait for that."""
    return float(np.median(window[:, :, _WAIT] + window[:, :, _EXCHANGE]))


def _without_worst(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return each rank's mean of (steps, ranks) values, without its worst steps."""
    mean: npt.NDArray[np.float64] = np.sort(values, axis=0)[: len(values) - WORST].mean(axis=0)
    return mean


def _beside_alike(
    values: npt.NDArray[np.float64], groups: Iterable[Sequence[int]]
) -> Iterator[tuple[int, float, float]]:
    """Yield (rank, value, median of the others in its group), for groups of several ranks."""
    for group in groups:
        if len(group) > 1:
            for number, value, usual in _beside_others(values[list(group)]):
                yield group[number], value, usual


def _beside_others(values: npt.NDArray[np.float64]) -> Iterator[tuple[int, float, float]]:
    """Yield (rank, value, median of the others), sorting only once."""
    order, num_others = np.argsort(values, kind="stable"), len(values) - 1
    ascending = values[order].tolist()
    middle = ((num_others - 1) // 2, num_others // 2)
    for place, rank in enumerate(order.tolist()):
        low, high = (ascending[at + (place <= at)] for at in middle)
        yield rank, ascending[place], (low + high) / 2
