"""What a run sees of itself, and what that costs.

    python -m benchmarks.insight [--json] [--quick] [--only NAME]

overhead_always_on    CPU time that a rank spends on phases in a step, over that of the step: marks, its row's columns,
                      and what rank 0 adds up, of a rank with 8 lanes in a world of 8 (goal: at most 0.005)
always_on_us          the same in microseconds a step, with the step's own

The last line is JSON.
"""

from __future__ import annotations

from benchmarks.figures import Measure, measure_chosen
from benchmarks.insight import always_on

FIGURES: dict[str, Measure] = {
    "overhead_always_on": always_on.overhead,
    "always_on_us": always_on.overhead,
}


if __name__ == "__main__":
    measure_chosen("benchmarks.insight", __doc__, FIGURES)
