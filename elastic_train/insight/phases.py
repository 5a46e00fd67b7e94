"""Measure each rank's time per phase, and its memory, and find the rank that the others wait for.

Marks divide a rank's time completely: the time since the last mark, less the time waiting for peers, belongs to the
phase that the next mark names. The phases of a row therefore add up to the seconds between two rows. Results are not
affected, and a mark costs less than a microsecond.

Sums over a window are of one world, so its rows are of the same ranks; a run's summary has means over ranks, and may
span worlds.

MFU and HFU are the share of the devices' peak that a run uses; a file in the run's folder has their inputs.

A rank's memory is its peak, and the parts of it that are known to the byte. Parts are named as by `elastic-train plan`,
and are held from step to step. The rest of the peak are activations, temporary memory of a step, and what the allocator
keeps.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np

Phase = Literal["data", "to_device", "forward", "backward", "wait", "exchange", "optimizer", "save", "rest"]
PHASES: tuple[Phase, ...] = (
    *("data", "to_device", "forward", "backward", "wait", "exchange", "optimizer", "save", "rest"),
)
COMPUTED: tuple[Phase, ...] = ("to_device", "forward", "backward")
"""Phases that a device spends on a lane."""
SLOW_RATIO = 1.5
"""A rank is named if its compute takes this multiple of the median: ranks do the same but for noise."""

FILE = "utilisation.json"

FOLDER = "memory"
"""Folder of memory snapshots below a run's folder, written when a rank runs out of memory."""
PARTS = ("weights", "gradients", "optimizer", "sums", "exchange", "buffers", "staging")
REST = "rest"
"""Name of the rest of a peak."""


class RankFacts(NamedTuple):
    """One rank's measurements between its last two rows, in seconds and bytes.

    Of the row's own step: `data_s` waiting for samples, `to_device_s`, `forward_s` and `backward_s` of its lanes. Of
    the step before: `wait_s` for the slowest rank, `exchange_s` for exchange without computation, `optimizer_s`,
    `save_s` that training waited for saves, and `rest_s`. These add up to the time between the rows. `hidden_s` is
    exchange during computation, `exchanged_bytes` the data exchanged. `round_trip_s` is of the rank's best connection
    to a peer, 0 if unknown.
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
        return self.forward_s + self.backward_s

    @property
    def total_s(self) -> float:
        return sum(self[: len(PHASES)])


class Exchanging(Protocol):
    """A group's interface for a clock: growing counters, and the distance to peers."""

    num_bytes: int
    waited_s: float
    beside_s: float

    def round_trip_s(self) -> float: ...


class Computing(Protocol):
    """The interface of a device that works asynchronously (`DeviceTimes`), for a clock."""

    def note(self, phase: str) -> None: ...
    def take(self, phases: Collection[str]) -> dict[str, float]: ...


class StepClock:
    """Measures the phases of a rank's steps from mark to mark; `row` returns the times since the last row.

    With a device, the lanes' total is the time on the host until all were done, and the device says how it divides into
    forward and backward.
    """

    def __init__(self, group: Exchanging | None = None, device: Computing | None = None) -> None:
        self._group, self._device = group, device
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._last_s = 0.0
        self.listener: Callable[[Phase, float], None] | None = None
        """Called with every mark, and the seconds before it."""
        self._waited_s, self._beside_s, self._num_bytes = self._counters()

    def start(self) -> None:
        """Start to measure: the time since the last mark belongs to no phase."""
        self._last_s = time.perf_counter()
        if self._group is not None:
            self._waited_s = self._group.waited_s

    def mark(self, phase: Phase) -> None:
        """Assign the time since the last mark to a phase; waits for peers in it count as exchange."""
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
        """Return the fields of `RankFacts` for the time since the last row, and reset.

        Device work that is not done yet counts in the next row.
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
        """Divide the lanes' time among its phases in the device's proportions."""
        host_s, device_s = sum(self._spent[phase] for phase in COMPUTED), sum(by_device.values())
        if device_s > 0:
            for phase in COMPUTED:
                self._spent[phase] = host_s * by_device[phase] / device_s

    def _counters(self) -> tuple[float, float, int]:
        group = self._group
        return (0.0, 0.0, 0) if group is None else (group.waited_s, group.beside_s, group.num_bytes)


def facts_of(row: Sequence[float | int]) -> RankFacts:
    """Parse the output of `StepClock.row`."""
    return RankFacts._make(row)


def slowest(
    ranks: Sequence[RankFacts], num_lanes: Sequence[int], alike: Sequence[Sequence[int]] = ()
) -> tuple[int, float] | None:
    """Return the rank with the longest time per lane, and its multiple of the median; None if unremarkable.

    Times are per lane: with an uneven division, a rank with more lanes is not slow. Ranks are compared within their
    group of `alike`, which compute the same for their lanes; all ranks by default.
    """
    times = [facts.compute_s / max(1, lanes) for facts, lanes in zip(ranks, num_lanes, strict=True)]
    ratios: dict[int, float] = {}
    for group in alike or [range(len(times))]:
        median = statistics.median_low([times[rank] for rank in group]) if len(group) > 1 else 0.0
        ratios |= {rank: times[rank] / median for rank in group if median > 0}
    rank = max(ratios, key=ratios.__getitem__, default=None)
    return None if rank is None or ratios[rank] < SLOW_RATIO else (rank, ratios[rank])


Summary = Mapping[str, object]


class PhaseWindow:
    """Sums of the rows of one world's ranks."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._sums = np.zeros((0, len(RankFacts._fields)))

    def add(self, ranks: Sequence[RankFacts]) -> None:
        rows = np.array(ranks)
        self._sums = rows if self.num_steps == 0 else self._sums + rows
        self.num_steps += 1

    def by_rank(self) -> list[RankFacts]:
        """Return each rank's totals, with the mean of round trips."""
        sums = self._sums.copy()
        sums[:, -1] /= max(1, self.num_steps)
        return [RankFacts._make(row) for row in sums.tolist()]

    def mean(self) -> dict[str, float]:
        """Return the mean of every phase over ranks and steps, in seconds, and of hidden exchange."""
        if self.num_steps == 0:
            return {}
        means = (self._sums.mean(axis=0) / self.num_steps).tolist()
        return dict(zip((*PHASES, "hidden"), means, strict=False))


class PhaseTotals:
    """Totals of an average rank over all steps that a process has seen."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._sums = np.zeros(len(RankFacts._fields))

    def add(self, window: PhaseWindow) -> None:
        if window.num_steps:
            self._sums += np.array(window.by_rank()).mean(axis=0)
            self.num_steps += window.num_steps

    def summary(self) -> Summary | None:
        """Return the summary for result.json; None before the first step.

        Shares are of a step's time, and add up to 1 over phases; `bytes` are given to collectives per step.
        """
        if self.num_steps == 0:
            return None
        per_step = dict(zip(RankFacts._fields, (self._sums / self.num_steps).tolist(), strict=True))
        total_s = sum(per_step[f"{phase}_s"] for phase in PHASES)
        return {
            "steps": self.num_steps,
            "step_s": total_s,
            "seconds": {phase: per_step[f"{phase}_s"] for phase in PHASES},
            "share": {phase: per_step[f"{phase}_s"] / total_s if total_s else 0.0 for phase in PHASES},
            "hidden_s": per_step["hidden_s"],
            "bytes": round(per_step["exchanged_bytes"]),
        }


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Model FLOPs per sample, FLOPs per sample that recomputation adds, and the peak FLOP/s of a rank's device."""

    flops_per_sample: float
    recomputed_flops_per_sample: float
    peak_flops: float

    def mfu(self, samples_per_s: float, num_ranks: int) -> float:
        """Return the share of all devices' peak that the model's own operations use."""
        return samples_per_s * self.flops_per_sample / (num_ranks * self.peak_flops)

    def hfu(self, samples_per_s: float, num_ranks: int) -> float:
        """Return the share of all devices' peak that all operations use, recomputed ones included."""
        return self.mfu(samples_per_s, num_ranks) * (1 + self.recomputed_flops_per_sample / self.flops_per_sample)

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def read_utilisation(run_dir: Path) -> Utilisation | None:
    """Read the file in a run's folder; None if it is missing or unreadable."""
    try:
        found = Utilisation(**json.loads((run_dir / FILE).read_text()))
        return found if found.flops_per_sample > 0 and found.peak_flops > 0 else None
    except (OSError, ValueError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """One rank's memory, in bytes.

    `peak` is of its device: on a GPU the most memory of tensors, and `reserved` of torch's allocator; on a CPU the most
    resident bytes of the process, which had `program` before it built its model. `parts` are on the device; `host` is
    host memory held next to a GPU, and `host_peak` the process's most resident bytes there.
    """

    device: str
    peak: int
    parts: Mapping[str, int]
    program: int = 0
    reserved: int | None = None
    host: int = 0
    host_peak: int | None = None

    @property
    def rest(self) -> int:
        """Peak without the parts, including parts released before the measurement."""
        return max(0, self.peak - self.program - sum(self.parts.values()))

    def as_fields(self) -> dict[str, object]:
        """Return the fields for a history's line or a snapshot."""
        of_cpu: dict[str, object] = {"program": self.program} if self.reserved is None else {}
        of_gpu = {"reserved": self.reserved, "host": self.host, "host_peak": self.host_peak}
        return {"device": self.device, "peak": self.peak, **(of_cpu or of_gpu), "parts": dict(self.parts)}


def memory_facts_of(fields: Mapping[str, object]) -> MemoryFacts | None:
    """Parse the output of `as_fields`; None if it is something else."""
    parts, peak = fields.get("parts"), fields.get("peak")
    numbers = {key: fields.get(key) for key in ("program", "reserved", "host", "host_peak")}
    known = {key: value for key, value in numbers.items() if value is not None}
    if not isinstance(parts, dict) or not all(map(_is_size, (peak, *known.values(), *parts.values()))):
        return None
    return MemoryFacts(str(fields.get("device")), peak, parts, **known)  # type: ignore[arg-type]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
