"""Coverage strips: how often each position of each epoch was applied and, with a witness, each sample.

A strip consists of cells. A cell shows the minimum and the maximum over its positions, so that a single repeat or gap
among millions is visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from chaos.judge.evidence.applied import counts_of, shape_of
from chaos.judge.evidence.run_files import Evidence
from chaos.judge.evidence.script_samples import counts_of as rows_of
from chaos.judge.evidence.script_samples import is_script
from elastic_train.drawing.svg import LEFT, RIGHT, Axis, along_x, figure, rect, text

_TOP, _ROW, _HEIGHT = 16.0, 22.0, 14.0
_CELLS, _MOST_EPOCHS = 326, 16

Row = tuple[str, npt.NDArray[np.int64], npt.NDArray[np.int64], tuple[int, int]]
"""A strip's name, minimum and maximum of each cell, and the range of correct counts."""


def coverage_figure(run: Evidence) -> Markup:
    """Draw one strip per epoch (or per group of epochs, if there are many), and one for the witness."""
    rows, along = list(_epochs(run)), "% of the epoch, in the order of its steps"
    if is_script(run):
        along = "% of the dataset, in the order of its rows"
    bottom = _TOP + len(rows) * _ROW
    parts = along_x(Axis(0.0, 100.0), _TOP, bottom, along)
    for number, row in enumerate(rows):
        parts += _strip(row, _TOP + number * _ROW)
    if run.witness is not None and run.witness.size:
        top = bottom + 48
        bottom = top + _ROW
        parts += along_x(Axis(0.0, float(run.witness.size)), top, bottom, "sample")
        parts += _strip(_witness(run), top)
    return figure(bottom + 34, "how often every place of every epoch was applied", parts)


def _epochs(run: Evidence) -> Iterator[Row]:
    # A script logs rows, which have no lanes.
    counts = {epoch: times[:, None] for epoch, times in rows_of(run).items()} if is_script(run) else counts_of(run)
    epochs, together = sorted(counts), -(-len(counts) // _MOST_EPOCHS)  # a script may count from 1
    for lo in range(0, len(epochs), together):
        drawn = epochs[lo : lo + together]
        group = [counts[epoch] for epoch in drawn]
        longest = max(len(epoch) for epoch in group)
        cells = min(_CELLS, longest)
        least, most = np.full(cells, np.iinfo(np.int64).max), np.zeros(cells, np.int64)
        for epoch in group:
            cell = np.arange(len(epoch)) * cells // longest
            np.minimum.at(least, cell, epoch.min(axis=1))
            np.maximum.at(most, cell, epoch.max(axis=1))
        name = f"epoch {drawn[0]}" if len(drawn) == 1 else f"{drawn[0]}–{drawn[-1]}"
        yield name, least, most, (1, 1)


def _witness(run: Evidence) -> Row:
    assert run.witness is not None, "only called with a witness"
    shape, size = shape_of(run), run.witness.size
    starts = np.unique(np.arange(_CELLS) * size // _CELLS)
    right = (shape.total_steps // shape.steps_per_epoch, shape.num_epochs)
    return "witness", np.minimum.reduceat(run.witness, starts), np.maximum.reduceat(run.witness, starts), right


def _strip(row: Row, top: float) -> list[Markup]:
    name, least, most, right = row
    axis = Axis(0.0, float(len(least)))
    parts = [text(LEFT - 8, top + _HEIGHT - 2, name, class_="end")]
    lo = 0
    for (low, high), group in groupby(zip(least.tolist(), most.tolist(), strict=True)):
        hi = lo + len(list(group))
        kind = "covered" if right[0] <= low and high <= right[1] else "missing" if low < right[0] else "repeated"
        times = f"{low}" if low == high else f"{low} to {high}"
        share = f"{100 * lo / len(least):.1f} to {100 * hi / len(least):.1f} %"
        # A wrong cell is wide enough to be visible.
        end = max(axis(hi), axis(lo) + (0.0 if kind == "covered" else 4.0))
        box = ((axis(lo), top), (min(end, RIGHT), top + _HEIGHT))
        parts.append(rect(*box, f"{name}, {share}: each applied {times} times", class_=kind))
        lo = hi
    return parts
