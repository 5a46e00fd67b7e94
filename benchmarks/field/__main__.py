"""Compare recovery and goodput of large worlds: ours from measured parts, others from their published recovery time.

    python -m benchmarks.field [--parts FILE] [--write docs/benchmarks.md]

All systems are drawn with the same failures (`published.yaml` has the rates, the assumptions and the sources), over
`days` days, `draws` times: medians, and 5 to 95 % of the seconds. Seconds count from a failure until its lost work was
repeated.

FILE is the output of `python -m benchmarks.scale --json`. *As measured* is the clock of the largest world, whose ranks
shared cores; *extrapolated* assumes that each rank has a core, whose seconds grow as `a + b * ranks`, and that of the
rest only etcd's grow, with its events, hence with the ranks. Restart and saves have the defaults of
`elastic-train plan`. Others are assumed to need the same time at every size and never to save.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np

from benchmarks.field.lives import Fleet, Life, Recovery, live
from benchmarks.field.parts import JOIN, PARTS, Parts, read
from benchmarks.figures import rewrite
from elastic_train.checkpoint.saving.cadence import SaveCost, choose
from elastic_train.config import yaml12
from elastic_train.planning.arithmetic.goodput import RPO_S, STALL_S_PER_GB, Reliability

HERE = Path(__file__).parent
BEGIN, END = "<!-- field -->", "<!-- end of field -->"
PLANNED = Reliability()


Build = Callable[[int, float], Recovery]
"""Returns a system's recovery by the number of ranks and the seconds between failures."""
Draw = Callable[[Sequence[str], Random], float]
"""Draws the seconds of a world change with these parts."""


@dataclass(frozen=True, slots=True)
class Case:
    """A number of ranks with a published failure rate."""

    ranks: int
    hours: float


@dataclass(frozen=True, slots=True)
class System:
    """A row of the table."""

    name: str
    basis: str
    build: Build


class Field:
    """The systems to compare, under the assumptions of `published.yaml` and with our measured parts."""

    def __init__(self, parts: Parts) -> None:
        tree = cast(Mapping[str, Any], yaml12.parse((HERE / "published.yaml").read_text()))
        self.parts, self.rates, self.others = parts, tree["rates"], tree["systems"]
        self.assumed: Mapping[str, float] = tree["assumed"]

    @property
    def cases(self) -> list[Case]:
        found = [(int(ranks), hours) for rate in self.rates for ranks, hours in rate["hours"].items()]
        return [Case(ranks, hours) for ranks, hours in sorted(found, key=lambda one: (one[0], -one[1]))]

    def systems(self) -> Iterator[System]:
        """Yield the rows of the table: ours, then others."""
        most = self.parts.largest
        yield System(
            "ours, live, as measured", f"clock of {most} ranks", lambda _, s: self._live(s, self.parts.measured)
        )
        basis = "a + b · ranks, etcd's c · ranks"
        yield System("ours, live, extrapolated", basis, lambda ranks, s: self._live(s, self._extrapolated(ranks)))
        yield System("ours, restart from commits", f"{PLANNED.restart_s:g} s to start, assumed", self._restart)
        for other in self.others:
            if "down_s" in other:
                yield System(f"[{other['name']}]({other['source']})", other["says"], self._other(other["down_s"]))

    def only_published(self) -> Iterator[Mapping[str, str]]:
        """Yield the systems that publish no seconds from which their goodput could be drawn."""
        yield from ({**other, "also": f", {other['says']}"} for other in self.others if "down_s" not in other)

    def lives(self, case: Case, build: Build) -> list[Life]:
        """Draw the lives of a system; every system has the same failures until their costs differ."""
        assumed, mtbf_s = self.assumed, 3600.0 * case.hours
        standby = max(1, round(assumed["standby_share"] * case.ranks / assumed["devices_per_node"]))
        fleet = Fleet(mtbf_s, int(case.ranks // assumed["devices_per_group"]), standby, PLANNED.repair_s)
        recovery, seeds = build(case.ranks, mtbf_s), range(int(assumed["draws"]))
        return [live(recovery, fleet, assumed["days"], Random(assumed["seed"] + seed)) for seed in seeds]

    def _extrapolated(self, ranks: int) -> Draw:
        return lambda names, chance: self.parts.extrapolated(names, ranks, self.assumed["etcd_cores"], chance)

    def _live(self, mtbf_s: float, draw: Draw) -> Recovery:
        """Return live recovery: the lease and the parts, then a standby's join with its state."""
        cost, every_s = self._saves(mtbf_s)
        lease_s, state_s = self.assumed["lease_s"], self.assumed["state_gb_per_rank"] / self.assumed["link_gb_per_s"]
        return Recovery(
            lambda chance: lease_s + draw(PARTS, chance),
            lambda chance: state_s + draw(JOIN, chance),
            self.assumed["step_s"],
            cost,
            every_s,
        )

    def _restart(self, _: int, mtbf_s: float) -> Recovery:
        cost, every_s = self._saves(mtbf_s)
        load_s = self.assumed["state_gb_per_rank"] / PLANNED.store_gb_per_s
        down_s = self.assumed["lease_s"] + PLANNED.restart_s + load_s
        return Recovery(lambda _: down_s, cost=cost, every_s=every_s)

    def _other(self, down_s: float) -> Build:
        return lambda *_: Recovery(lambda _: down_s, lost_step_s=self.assumed["step_s"])

    def _saves(self, mtbf_s: float) -> tuple[SaveCost, float]:
        """Return the cost of a save, and the interval that `elastic-train plan` would choose."""
        staged_gb = self.assumed["state_gb_per_rank"]
        cost = SaveCost(STALL_S_PER_GB * staged_gb, staged_gb / PLANNED.store_gb_per_s)
        return cost, choose(cost, mtbf_s, RPO_S, PLANNED.restart_s).interval_s


def section(field: Field) -> str:
    """Return the table in Markdown, below a line on the parts."""
    cases, sizes = field.cases, sorted({case.ranks for case in field.cases})
    head = ["", "basis", *(f"s, {size:,} ranks" for size in sizes)]
    head += [f"%, {case.ranks:,}, every {case.hours:.3g} h" for case in cases]
    lines = [_line(head), "|" + "---|" * len(head)]
    for system in field.systems():
        lives = {case: field.lives(case, system.build) for case in cases}
        costs = [
            [s for case in lives if case.ranks == size for life in lives[case] for s in life.recovery_s]
            for size in sizes
        ]
        shares = [[100 * life.goodput for life in lives[case]] for case in cases]
        cells = [*(_spread(each) for each in costs), *(f"{np.median(each):.2f}" for each in shares)]
        lines.append(_line([system.name, system.basis, *cells]))
    rates, others = (
        sep.join(f"[{one['name']}]({one['source']}){one.get('also', '')}" for one in some)
        for sep, some in ((", ", field.rates), ("; ", field.only_published()))
    )
    return "\n".join([f"Parts: {field.parts.described}. Failures of {rates}. Only published: {others}.", "", *lines])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(seconds: Sequence[float]) -> str:
    """Return the median and the 5th to 95th percentile."""
    low, middle, high = np.percentile(seconds, (5, 50, 95))
    return f"{middle:.0f} ({low:.0f}–{high:.0f})"


def main() -> None:
    """Print the table, or write it to a document."""
    arguments = argparse.ArgumentParser(
        prog="python -m benchmarks.field", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--parts", type=Path, default=HERE / "parts.json", metavar="FILE", help="measured parts")
    arguments.add_argument("--write", type=Path, metavar="FILE", help="keep the table between the marks of this file")
    chosen = arguments.parse_args()
    found = section(Field(read(chosen.parts)))
    if chosen.write is not None:
        rewrite(chosen.write, BEGIN, END, lambda _: found)
    print(found)


if __name__ == "__main__":
    main()
