"""Time the exchange plan after the loss of one rank, and measure how much it moves; no tensor is touched."""

from __future__ import annotations

import time

from benchmarks.figures import Effort
from elastic_train.shards.grains import Layout, Listed, lay_out
from elastic_train.shards.holdings import all_held, circle_of
from elastic_train.shards.recut import Holder, plan_recut
from elastic_train.shards.seats import seats_of

COPIES, WIDTH, HIDDEN, DEPTH, VOCABULARY = 2, 4096, 11008, 32, 32000
"""A decoder of 6.7 billion elements, each held twice."""


def plans(effort: Effort) -> dict[str, object]:
    """Return the seconds of a core for seats, holdings and plan after a loss, and what moves over what was lost."""
    layout, seconds, moved = decoder(), dict[str, float](), dict[str, float]()
    circle = circle_of(layout)
    for size in (8, 256) if effort.is_quick else (8, 64, 256, 1024):
        seats = seats_of([()] * size, COPIES)
        had = all_held(circle, seats)
        began = time.process_time()
        left = seats_of([()] * (size - 1), COPIES, seats[:-1])
        plan = plan_recut([Holder((1, 1), grains) for grains in had[:-1]], all_held(circle, left), layout.span)
        seconds[f"ranks_{size}"] = round(time.process_time() - began, 3)
        arriving = sum(int(layout.span[one.grains].sum()) for one in plan.transfers)
        moved[f"ranks_{size}"] = round(arriving / int(layout.span[had[-1]].sum()), 2)
        effort.say(f"{size} ranks: {seconds[f'ranks_{size}']} s, {moved[f'ranks_{size}']} of what was lost moves")
    return {"plan_s": seconds, "moved_over_lost": moved}


def decoder() -> Layout:
    """Return the layout of the decoder, a unit for each block."""
    square, wide = (WIDTH, WIDTH), (HIDDEN, WIDTH)
    block = {"q": square, "k": square, "v": square, "o": square, "gate": wide, "up": wide, "down": wide[::-1]}
    listed = [Listed("embed", (VOCABULARY, WIDTH), "torch.float32")]
    for number in range(DEPTH):
        name = f"blocks.{number}"
        listed += [Listed(f"{name}.{part}", shape, "torch.float32", unit=name) for part, shape in block.items()]
        listed += [Listed(f"{name}.norm{turn}", (WIDTH,), "torch.float32", unit=name) for turn in (1, 2)]
    return lay_out([*listed, Listed("head", (VOCABULARY, WIDTH), "torch.float32")])
