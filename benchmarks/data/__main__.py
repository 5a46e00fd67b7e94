"""Measure the order of samples: padding with and without length buckets, and how well blocks of row groups shuffle.

    python -m benchmarks.data [--json] [--quick] [--only NAME]

padding      share of positions that are padding, by the steps of a length bucket's window
imbalance    excess work of the busiest of 8 ranks in a step over the mean, for which the others wait
composition  difference of a step's rows from a draw from the whole dataset, by order: chi-square per degree of freedom
             over labels, or sources; a full shuffle has 1, steps of one label each have 64
loss         loss on 4,096 other rows after an epoch of a small classifier, by order, over 5 seeds
off_full     the difference of these losses from a full shuffle's, in standard errors over the seeds

The last line is JSON.
"""

from __future__ import annotations

from benchmarks.data.padding import padding
from benchmarks.data.shuffle import shuffling
from benchmarks.figures import measure_chosen

FIGURES = {
    **dict.fromkeys(("padding", "imbalance"), padding),
    **dict.fromkeys(("composition", "loss", "off_full"), shuffling),
}


if __name__ == "__main__":
    measure_chosen("benchmarks.data", __doc__, FIGURES)
