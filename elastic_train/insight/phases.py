"""Where a rank's step time goes, phase by phase, and which rank the others wait for.

A clock's marks tile its rank's time: what has passed since the last mark was the phase that the next one names, less
what the rank has waited for peers in between. So a row's phases add up to the seconds between two rows. Nothing here
decides a bit, and a mark costs less than a microsecond.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

Phase = Literal["data", "to_device", "forward", "backward", "wait", "exchange", "optimizer", "save", "rest"]
PHASES: tuple[Phase, ...] = (
    *("data", "to_device", "forward", "backward", "wait", "exchange", "optimizer", "save", "rest"),
)
COMPUTED: tuple[Phase, ...] = ("to_device", "forward", "backward")
"""What a device does of a lane."""
SLOW_RATIO = 1.5
"""A rank that computes for so many times the median is named: what ranks do in a step is alike but for noise."""


class RankFacts(NamedTuple):
    """What one rank measured between its last two rows, in seconds and bytes.

    Of the row's own step: `data_s` waiting for its samples, `to_device_s`, `forward_s` and `backward_s` of its lanes.
    Of the step before: `wait_s` for the slowest rank, `exchange_s` in which nothing but the exchange went on,
    `optimizer_s`, `save_s` that training waited for saves, and `rest_s`. These add up to the time between the rows.
    `hidden_s` is what exchanges took beside computing, `exchanged_bytes` what was given to them. `round_trip_s` is that
    of the rank's best connection to a peer, 0 where it is not known.
    """

    data_s: float
    to_device_s: float
    forward_s: float
    backward_s: float
    wait_s: float
    exchange_s: float
    optimizer_s: float
    save_s: float
    rest_s: float
    hidden_s: float
    exchanged_bytes: int
    round_trip_s: float

    @property
    def compute_s(self) -> float:
        """How long the rank's lanes took."""
        return self.forward_s + self.backward_s

    @property
    def total_s(self) -> float:
        """The seconds between the two rows."""
        return sum(self[: len(PHASES)])


class Exchanging(Protocol):
    """What a clock asks of a group: its counters, which only grow, and how far its peers are."""

    num_bytes: int
    waited_s: float
    beside_s: float

    def round_trip_s(self) -> float: ...


class Computing(Protocol):
    """What a clock asks of a device that does its work after the calls that ask for it (`DeviceTimes`)."""

    def note(self, phase: str) -> None: ...
    def take(self, phases: Collection[str]) -> dict[str, float]: ...


class StepClock:
    """Measures the phases of a rank's steps from mark to mark; `row` says what has passed since the last row.

    With a device, what its lanes took together is what passed on the host until all were done, and the device says how
    much of that was forward, and how much backward.
    """

    def __init__(self, group: Exchanging | None = None, device: Computing | None = None) -> None:
        self._group, self._device = group, device
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._last_s = 0.0
        self.listener: Callable[[Phase, float], None] | None = None
        """Is told of every mark, and of the seconds before it."""
        self._waited_s, self._beside_s, self._num_bytes = self._counters()

    def start(self) -> None:
        """Begin to measure: what has passed since the last mark belongs to no phase."""
        self._last_s = time.perf_counter()
        if self._group is not None:
            self._waited_s = self._group.waited_s

    def mark(self, phase: Phase) -> None:
        """Say what has gone on since the last mark; what was spent waiting for peers meanwhile is exchange."""
        now = time.perf_counter()
        seconds, self._last_s = now - self._last_s, now
        if self.listener is not None:
            self.listener(phase, seconds)
        if self._device is not None:
            self._device.note(phase)
        if (group := self._group) is not None and group.waited_s != self._waited_s:
            if phase not in ("wait", "save"):
                waited_s = min(seconds, group.waited_s - self._waited_s)
                self._spent["exchange"] += waited_s
                seconds -= waited_s
            self._waited_s = group.waited_s
        self._spent[phase] += seconds

    def row(self) -> list[float | int]:
        """Return what `RankFacts` says of the time since the last row, in its order, and begin anew.

        What a device has not done by now counts in the next row.
        """
        self.mark("rest")
        if self._device is not None:
            self._divide(self._device.take(COMPUTED))
        _, beside_s, num_bytes = self._counters()
        hidden = [beside_s - self._beside_s, num_bytes - self._num_bytes]
        self._beside_s, self._num_bytes = beside_s, num_bytes
        spent, self._spent = self._spent, dict.fromkeys(PHASES, 0.0)
        return [*spent.values(), *hidden, self._group.round_trip_s() if self._group is not None else 0.0]

    def _divide(self, by_device: Mapping[str, float]) -> None:
        """Divide what the lanes took among its phases as a device has spent it."""
        host_s, device_s = sum(self._spent[phase] for phase in COMPUTED), sum(by_device.values())
        if device_s > 0:
            for phase in COMPUTED:
                self._spent[phase] = host_s * by_device[phase] / device_s

    def _counters(self) -> tuple[float, float, int]:
        group = self._group
        return (0.0, 0.0, 0) if group is None else (group.waited_s, group.beside_s, group.num_bytes)


def facts_of(row: Sequence[float | int]) -> RankFacts:
    """Read what `StepClock.row` wrote."""
    return RankFacts._make(row)


def slowest(
    ranks: Sequence[RankFacts], num_lanes: Sequence[int], alike: Sequence[Sequence[int]] = ()
) -> tuple[int, float] | None:
    """Return the rank whose lanes took longest, and how many times the median that was; None if it is unremarkable.

    For each of its lanes: where they do not go into the ranks evenly, who has more takes longer and is not slow. It is
    beside the others of its group of `alike`, which compute the same of their lanes: all ranks by default.
    """
    times = [facts.compute_s / max(1, lanes) for facts, lanes in zip(ranks, num_lanes, strict=True)]
    ratios: dict[int, float] = {}
    for group in alike or [range(len(times))]:
        median = statistics.median_low([times[rank] for rank in group]) if len(group) > 1 else 0.0
        ratios |= {rank: times[rank] / median for rank in group if median > 0}
    rank = max(ratios, key=ratios.__getitem__, default=None)
    return None if rank is None or ratios[rank] < SLOW_RATIO else (rank, ratios[rank])
