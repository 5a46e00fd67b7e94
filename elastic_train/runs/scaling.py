"""Strong scaling of runs of one job on 1 to n ranks: speed-up, efficiency, waiting, and the limiting phase.

The global batch does not depend on the world, so ideally W ranks take 1/W of the time of one. Phases tile a step, so
the excess over the ideal is split over phases, and the phase with the largest excess is the limit.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.errors import ConfigError
from elastic_train.insight.phases import PHASES, RankFacts
from elastic_train.runs.report import RunReport
from elastic_train.runs.story import Phases

REMEDIES = {
    "data": "reading does not keep up: more read-ahead, data.cache_dir, a faster store",
    "to_device": "handing samples to devices does not become less: the host's memory or PCIe is shared",
    "compute": "computing does not become less: ranks share cores, caches, memory or power",
    "wait": "ranks wait for the slowest: lanes that do not go evenly into ranks, or a slow rank (events of the run)",
    "exchange": "the network: smaller parallel.bucket_mb hides more, parallel.wire: bf16 sends less, larger batches "
    "exchange less often",
    "optimizer": "each rank updates all weights: parallel.shards divides that",
    "save": "saves: commit less often, checkpoint.near_dir",
    "rest": "what each rank does by itself: larger micro-batches make it a smaller share",
}
_BYTES = RankFacts._fields.index("exchanged_bytes")
_HIDDEN = RankFacts._fields.index("hidden_s")
_EXCHANGE = RankFacts._fields.index("exchange_s")


@dataclass(frozen=True, slots=True)
class Point:
    """A run on `ranks` ranks: mean seconds of a step by phase, and the bytes that a rank sends in it."""

    name: str
    ranks: int
    num_lanes: int | None
    step_s: float
    samples_per_s: float
    phases_s: dict[str, float]
    hidden_s: float
    sent_bytes: float

    @property
    def communication_share(self) -> float:
        """Fraction of a step in which ranks wait for peers and exchanges."""
        return (self.phases_s["wait"] + self.phases_s["exchange"]) / self.step_s


@dataclass(frozen=True, slots=True)
class Row:
    """A point relative to the smallest world; `excess_s` is the time of a step beyond the ideal, by phase.

    Forward and backward are one phase there, `compute`.
    """

    point: Point
    speedup: float
    efficiency: float
    excess_s: dict[str, float]

    @property
    def limit(self) -> str | None:
        """The phase with the largest excess; None for the smallest world, or if the excess is negligible."""
        phase = max(self.excess_s, key=self.excess_s.__getitem__)
        return phase if self.excess_s[phase] > 0.01 * self.point.step_s else None


@dataclass(frozen=True, slots=True)
class Scaling:
    """Rows by number of ranks."""

    rows: Sequence[Row]

    def as_json(self) -> dict[str, object]:
        return {
            "rows": [
                {
                    "run": row.point.name,
                    "ranks": row.point.ranks,
                    "step_s": row.point.step_s,
                    "samples_per_s": row.point.samples_per_s,
                    "speedup": row.speedup,
                    "efficiency": row.efficiency,
                    "communication_share": row.point.communication_share,
                    "hidden_s": row.point.hidden_s,
                    "sent_bytes": row.point.sent_bytes,
                    "excess_s": row.excess_s,
                    "limit": row.limit,
                }
                for row in self.rows
            ],
            "remedy": self.remedy(),
        }

    def remedy(self) -> str | None:
        """Return the largest world's limit and its remedy; None without a limit."""
        last = self.rows[-1]
        if last.limit is None:
            return None
        lanes, ranks = last.point.num_lanes, last.point.ranks
        if last.limit == "wait" and lanes is not None and lanes % ranks:
            most = -(-lanes // ranks)
            return (
                f"wait: {lanes} lanes do not go evenly into {ranks} ranks, so some have {most} and the others wait: "
                f"use a number of ranks that divides {lanes}, or more lanes"
            )
        return f"{last.limit}: {REMEDIES[last.limit]}"


def scaling(reports: Sequence[RunReport]) -> Scaling:
    """Compare runs of one job by number of ranks; raises one ConfigError with all reasons against it."""
    wrong, points = list[str](), list[Point]()
    for report in reports:
        try:
            points.append(point_of(report))
        except ConfigError as error:
            wrong += error.problems
    if not wrong and len({point.ranks for point in points}) < 2:
        sizes = ", ".join(f"{point.name} {point.ranks}" for point in points)
        wrong.append(f"--scaling needs runs on different numbers of ranks, and these have: {sizes}")
    batches = sorted({str(report.config.get("batch.global_batch")) for report in reports})
    if len(batches) > 1:
        wrong.append(f"--scaling needs runs of one job, and their batch.global_batch differ: {', '.join(batches)}")
    if wrong:
        raise ConfigError(*wrong)
    points.sort(key=lambda point: point.ranks)
    rows = [_row(points[0], point) for point in points]
    return Scaling(rows)


def point_of(report: RunReport) -> Point:
    """Average a run's windows of its most common world size; raises ConfigError if it has none."""
    by_size: dict[int, list[Phases]] = {}
    for world in report.story.worlds:
        # A world's first window includes one-time costs: kernel selection, connection warm-up.
        by_size.setdefault(world.size, []).extend(list(world.phases)[1:] or list(world.phases))
    ranks = max(by_size, key=lambda size: sum(window.steps for window in by_size[size]), default=0)
    windows = by_size.get(ranks, [])
    num = sum(window.steps for window in windows)
    if not num:
        raise ConfigError(
            f"{report.name} has no phases of ranks in its history: it is too short, or too old, to compare"
        )
    mean = [
        sum(statistics.fmean(row[place] for row in window.rows) for window in windows) / num
        for place in range(len(RankFacts._fields) - 1)
    ]
    step_s = sum(mean[: len(PHASES)])
    return Point(
        name=report.name,
        ranks=ranks,
        num_lanes=_lanes(report),
        step_s=step_s,
        samples_per_s=_global_batch(report) / step_s if step_s else 0.0,
        phases_s=dict(zip(PHASES, mean, strict=False)),
        hidden_s=mean[_HIDDEN],
        sent_bytes=mean[_BYTES],
    )


def _row(first: Point, point: Point) -> Row:
    share = first.ranks / point.ranks
    alone = {phase: 0.0 if phase in ("wait", "exchange") else first.phases_s[phase] * share for phase in PHASES}
    excess: dict[str, float] = {phase: point.phases_s[phase] - alone[phase] for phase in PHASES}
    excess = {"compute": excess.pop("forward") + excess.pop("backward"), **excess}
    if point is first:
        excess = dict.fromkeys(excess, 0.0)
    speedup = first.step_s / point.step_s
    return Row(point, speedup, speedup * share, excess)


def _global_batch(report: RunReport) -> int:
    text = report.config.get("batch.global_batch", "")
    return int(text) if text.isdecimal() else 0


def _lanes(report: RunReport) -> int | None:
    micro = report.config.get("batch.micro_batch", "")
    return _global_batch(report) // int(micro) if micro.isdecimal() and int(micro) else None
