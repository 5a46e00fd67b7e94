"""Parts of a recovery that `benchmarks.scale` measured, extrapolated as `a + b * ranks`.

Ranks that share cores slow each other down, so a slope measured with more ranks than cores is an upper bound as long
as a rank's own work grows at most linearly. Recoveries differ from the fit by a factor, drawn from those measured.
A file may say what `also` slowed the machine. `step`, the first step less a usual one, counts as zero where it is
negative.
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
Kills = Mapping[int, Sequence[Mapping[str, float]]]
"""Seconds of each part of each recovery, by number of ranks."""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds `a + b * ranks`; neither is negative."""

    a: float
    b: float

    def at(self, ranks: int) -> float:
        return self.a + self.b * ranks


@dataclass(frozen=True, slots=True)
class Parts:
    """Fitted parts, the factors by which measured recoveries differ from them, and a description of the machine."""

    lines: Mapping[str, Line]
    factors: Sequence[float]
    largest: int
    described: str

    def draw(self, names: Sequence[str], ranks: int, chance: Random) -> float:
        """Return the seconds of a world change with these parts."""
        return sum(self.lines[name].at(ranks) for name in names) * chance.choice(self.factors)


def read(path: Path) -> Parts:
    """Return the parts of a file that `benchmarks.scale --json` wrote; raises ConfigError if it has no kills."""
    try:
        tree = json.loads(path.read_text())
        kills = {
            int(ranks): [{name: max(0.0, float(one[name])) for name in PARTS} for one in each]
            for ranks, each in tree["kills"].items()
        }
        machine = tree["machine"]
        facts = [machine["date"], f"{machine['cores']} cores", f"torch {machine['torch']}", *machine.get("also", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: is not the output of python -m benchmarks.scale --json: {error!r}") from error
    if len(kills) < 2 or not all(kills.values()):
        raise ConfigError(f"{path}: needs recoveries of at least two numbers of ranks, has {sorted(kills)}")
    lines = {name: fit([(ranks, one[name]) for ranks, each in kills.items() for one in each]) for name in PARTS}
    expected = {ranks: sum(line.at(ranks) for line in lines.values()) for ranks in kills}
    factors = [sum(one.values()) / expected[ranks] for ranks, each in kills.items() for one in each]
    counts = ", ".join(str(ranks) for ranks in sorted(kills))
    return Parts(
        lines, factors, max(kills), f"{', '.join(facts)}, {len(factors)} killed nodes in worlds of {counts} ranks"
    )


def fit(points: Sequence[tuple[int, float]]) -> Line:
    """Return the least-squares line without negative coefficients."""
    ranks, seconds = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    b, a = np.polyfit(ranks, seconds, 1)
    if b < 0:
        return Line(max(0.0, float(seconds.mean())), 0.0)
    if a < 0:
        return Line(0.0, max(0.0, float(ranks @ seconds / (ranks @ ranks))))
    return Line(float(a), float(b))
