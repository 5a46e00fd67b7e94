"""Time a rank's planning when the world changes, and measure how much data moves, without touching tensors.

It covers everything from the ranks' reported states to the last run of elements that this rank holds, sends or
receives: seats, holdings, transfers, whole and sharded gradient sums, and what each writer has in commits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.figures import Effort
from elastic_train.job.sharded.held_tree import Held, written_of
from elastic_train.placement.grains import Layout, Listed, cut_along, lay_out
from elastic_train.placement.holdings import Column, column_of, grains_in, grains_in_each, num_elements, runs_of
from elastic_train.placement.seating import Recut, Seating, plan_recut
from elastic_train.placement.seats import Seat, seats_of_cells

WIDTH, HIDDEN, DEPTH, VOCABULARY = 4096, 11008, 32, 32000
"""A decoder of 6.7 billion elements."""
STAGES, TENSOR = 2, 4
NODE, TRIES = 8, 3


class Change(NamedTuple):
    """A world of `size` replicas, eight per node, that loses those from `first` on, or grows."""

    before: int
    after: int
    copies: int
    first: int = 0

    @property
    def name(self) -> str:
        return f"{self.before}_to_{self.after}_c{self.copies}"


def plans(effort: Effort) -> dict[str, object]:
    """Return each rank's CPU seconds for a change, and the elements moved over those lost or newly needed."""
    seconds, moved = dict[str, float](), dict[str, float]()
    whole = [column_of(decoder())]
    parts = [column_of(decoder(stage, TENSOR)) for stage in range(STAGES) for _ in range(TENSOR)]
    for size in (8, 256) if effort.is_quick else (8, 64, 256, 1024):
        changes = [Change(size, size - 1, 2, size // 3), *(Change(size - 1, size, copies) for copies in (1, 2))]
        cases = [(change.name, change, whole) for change in changes]
        if size > NODE:
            change = Change(size, size - NODE, 2, NODE)
            cells = Change(size // NODE, size // NODE - 1, 2, 1)
            cases += [(change.name, change, whole), (f"cells_{cells.name}", cells, parts)]
        for name, change, columns in cases:
            seconds[name], moved[name] = _measured(change, columns)
            effort.say(f"{name}: {seconds[name]} s, {moved[name]} of what was lost moves")
    return {"plan_s": seconds, "moved_over_lost": moved}


def decoder(stage: int | None = None, degree: int = 1) -> Layout:
    """Return the layout of the decoder, or of a shard of one of its stages, with a unit per block."""
    rows, columns = {"q": WIDTH, "k": WIDTH, "v": WIDTH, "gate": HIDDEN, "up": HIDDEN}, {"o": WIDTH, "down": HIDDEN}
    shapes: dict[str, tuple[tuple[int, ...], int | None]] = {
        **{name: ((size // degree, WIDTH), 0) for name, size in rows.items()},
        **{name: ((WIDTH, size // degree), 1) for name, size in columns.items()},
        **{f"norm{turn}": ((WIDTH,), None) for turn in (1, 2)},
    }
    blocks = [
        Listed(f"{unit}.{name}", shape, "torch.float32", unit, cut=cut_along(shape, dim))
        for unit in (f"blocks.{number}" for number in range(DEPTH if stage is None else DEPTH // STAGES))
        for name, (shape, dim) in shapes.items()
    ]
    table = VOCABULARY // degree, WIDTH
    first, last = (Listed(name, table, "torch.float32", cut=cut_along(table, 0)) for name in ("embed", "head"))
    return lay_out([*([] if stage else [first]), *blocks, *([last] if stage in (None, STAGES - 1) else [])])


def _measured(change: Change, columns: Sequence[Column]) -> tuple[float, float]:
    """Return the fewest seconds of several tries, and the elements moved over those lost or newly needed."""
    before = _seats(range(change.before), [None] * change.before, change)
    gone = range(change.first, change.first + change.before - change.after)
    stay = [replica for replica in range(max(change.before, change.after)) if replica not in gone]
    had = [before[replica] if replica < change.before else None for replica in stay]
    times = []
    for _ in range(TRIES):
        began = time.process_time()
        seats = _seats(stay, had, change, len(columns))
        plan = _work_out(columns, had, seats)
        times.append(time.process_time() - began)
    layout, circle = columns[0]
    away = [before[replica] for replica in gone] or [seats[-1]]
    lost = sum(num_elements(layout, grains_in(circle, seat.arcs)) for seat in away)
    arriving = sum(num_elements(layout, transfer.grains) for transfer in plan.transfers)
    return round(min(times), 3), round(arriving / lost, 2)


def _seats(replicas: Sequence[int], had: Sequence[Seat | None], change: Change, num_columns: int = 1) -> list[Seat]:
    each = NODE if num_columns == 1 else 1
    paths = [("", f"node{replica // each:04}") for replica in replicas]
    return seats_of_cells(paths, change.copies, [had] * num_columns, [True] * len(replicas))


def _work_out(columns: Sequence[Column], had: Sequence[Seat | None], seats: Sequence[Seat]) -> Recut:
    """Do the planning of the first column's second rank as in the trainer; return its column's plan."""
    layout, circle = columns[0]
    me = min(1, len(seats) - 1)
    seating = Seating(layout, circle, seats, me)
    have = grains_in_each(circle, [() if seat is None else seat.arcs for seat in had])
    plan = plan_recut(have, seating.holdings, layout.span)
    for giver, taker, grains in plan.transfers:
        if me in (giver, taker):
            seating.runs_at(taker, grains)
    seating.runs_at(me, seating.trained[me])
    seating.owned_runs(), seating.deliveries(), seating.refreshes
    seating.leaves(), seating.subtrees(), seating.means()
    runs_of(layout, seating.summed[me])
    seating.sections_of(me)
    for column in columns:
        others = Seating(*column, seats, 0) if len(columns) > 1 else seating
        max(grains.size for grains in others.trained)
        owned = others.owned_by(range(len(seats)))
        written_of(column.layout, [Held(grains, others.sections_of(rank)) for rank, grains in enumerate(owned)])
        others.are_sole_holders([False] * len(seats))
    return plan
