"""Draw docs/waste.svg: the share of time without progress over the interval between saves.

python -m benchmarks.waste. Nothing is measured here: the curves are those of `young_daly`, whose model a test compares
with a simulation.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from elastic_train.checkpoint.interval.cadence import SaveCost, optimum, waste

TARGET = Path(__file__).parent.parent / "docs" / "waste.svg"
COST = SaveCost(stall_s=1.3, publish_s=24.0)
MTBFS_H = (0.5, 2, 8, 24, 168)
INTERVALS_S = [10 * 1.05**number for number in range(145)]
RPO_S = 900.0


def draw() -> Figure:
    """Return the figure: one curve per fault rate with its optimum, and the RPO budget."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for hours in MTBFS_H:
        mtbf_s = hours * 3600.0
        (line,) = axes.plot(INTERVALS_S, [100 * waste(interval_s, COST, mtbf_s) for interval_s in INTERVALS_S])
        best_s = optimum(COST.stall_s, mtbf_s)
        axes.plot(
            best_s, 100 * waste(best_s, COST, mtbf_s), "o", color=line.get_color(), label=f"a fault every {hours} h"
        )
    axes.axvline(RPO_S - COST.publish_s, color="gray", linestyle="--", label="RPO budget of 15 min")
    axes.set(xscale="log", yscale="log", ylim=(0.1, 100), xlim=(INTERVALS_S[0], INTERVALS_S[-1]))
    axes.set(xlabel="seconds between saves", ylabel="% of the time wasted")
    axes.set_title(
        f"12 GB: a save stalls {COST.stall_s:g} s and is published after {COST.publish_s:g} s; dots: least waste"
    )
    axes.grid(which="both", alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def main() -> int:
    """Write the figure; the same input gives the same bytes."""
    mpl.rcParams["svg.hashsalt"] = "waste"
    mpl.rcParams["svg.fonttype"] = "none"
    draw().savefig(TARGET, metadata={"Date": None})
    sys.stdout.write(f"{TARGET}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
