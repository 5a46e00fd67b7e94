"""A recovery of many ranks, from the core seconds and the clock that `benchmarks.scale` measured on few cores.

Each rank of a large world has a core of its own, so the busiest rank's core seconds count, fitted as `a + b * ranks`;
measured ranks shared cores, so what all survivors computed is subtracted from the measured clock. The rest is latency,
which is drawn from the measured recoveries and does not grow. Etcd sends as many events for each rank: its core seconds
are fitted as `a + c * ranks`, and `c * ranks` is divided by its cores. A file may say what `also` slowed the machine.
`step`, the first step less a usual one, counts as zero where it is negative.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from elastic_train.errors import ConfigError

PARTS = ("detect", "form", "restore", "step")
JOIN = ("form", "restore", "step")
"""Parts of a world change that no failure caused, such as a standby's arrival."""
RANKS = 4
"""Ranks of a killed node."""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds `a + b * ranks`; neither is negative."""

    a: float
    b: float

    def at(self, ranks: int) -> float:
        return self.a + self.b * ranks


@dataclass(frozen=True, slots=True)
class Kill:
    """A measured recovery: the seconds of its parts, and the clock of one core while all survivors computed."""

    ranks: int
    clock: Mapping[str, float]
    shared_s: float

    def clock_s(self, names: Sequence[str]) -> float:
        """Return the measured seconds of these parts."""
        return sum(self.clock[name] for name in names)

    def latency_s(self, names: Sequence[str]) -> float:
        """Return the seconds of these parts in which no core was short."""
        return max(0.0, self.clock_s(names) - self.shared_s)


@dataclass(frozen=True, slots=True)
class Parts:
    """Measured recoveries, fitted core seconds of the busiest rank and of etcd, and a description of the machine."""

    kills: Sequence[Kill]
    busiest: Line
    etcd_s: float
    """Etcd's core seconds per rank."""
    described: str

    @property
    def largest(self) -> int:
        """Ranks of the largest measured world."""
        return max(kill.ranks for kill in self.kills)

    def measured(self, names: Sequence[str], chance: Random) -> float:
        """Return the seconds of a world change with these parts, as measured with the most ranks, on shared cores."""
        return chance.choice([kill for kill in self.kills if kill.ranks == self.largest]).clock_s(names)

    def extrapolated(self, names: Sequence[str], ranks: int, etcd_cores: float, chance: Random) -> float:
        """Return the seconds of a world change with these parts where each rank has a core of its own."""
        own_s, etcd_s = self.busiest.at(ranks), self.etcd_s * ranks / etcd_cores
        return chance.choice(self.kills).latency_s(names) + own_s + etcd_s


def read(path: Path) -> Parts:
    """Return the parts of a file that `benchmarks.scale --json` wrote; raises ConfigError if it has no kills."""
    try:
        tree = json.loads(path.read_text())
        machine, etcd = tree["machine"], [(int(ranks), float(one["etcd_s"])) for ranks, one in tree["etcd"].items()]
        found = [(int(ranks), one) for ranks, each in tree["kills"].items() for one in each]
        kills = [_kill(ranks, one, machine["cores"]) for ranks, one in found]
        busiest = [(ranks, float(one["busiest"])) for ranks, one in found]
        facts = [machine["date"], f"{machine['cores']} cores", f"torch {machine['torch']}", *machine.get("also", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: is not the output of python -m benchmarks.scale --json: {error!r}") from error
    sizes = sorted({kill.ranks for kill in kills})
    if len(sizes) < 2 or len(etcd) < 2:
        raise ConfigError(f"{path}: needs recoveries and loads of etcd of at least two numbers of ranks, has {sizes}")
    counts = f"{len(kills)} killed nodes in worlds of {', '.join(map(str, sizes))} ranks"
    return Parts(kills, fit(busiest), fit(etcd).b, ", ".join([*facts, counts]))


def _kill(ranks: int, found: Mapping[str, float], cores: int) -> Kill:
    clock = {name: max(0.0, float(found[name])) for name in PARTS}
    return Kill(ranks, clock, (ranks - RANKS) * max(0.0, float(found["cpu"])) / cores)


def fit(points: Sequence[tuple[int, float]]) -> Line:
    """Return the least-squares line without negative coefficients, from numbers of ranks to seconds."""
    ranks, seconds = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    b, a = np.polyfit(ranks, seconds, 1)
    if b < 0:
        return Line(max(0.0, float(seconds.mean())), 0.0)
    if a < 0:
        return Line(0.0, max(0.0, float(ranks @ seconds / (ranks @ ranks))))
    return Line(float(a), float(b))
