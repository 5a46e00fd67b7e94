"""Pipeline schedules: in which order a stage computes its lanes, and what it sends and awaits between two of them.

GPipe (Huang et al. 2019) runs all forward passes, then all backward passes. 1F1B (Narayanan et al. 2021, section 2.2)
begins the first backward pass as soon as it can, so stage s of S keeps at most S - s lanes alive. Backward passes come
in the order of the lanes in both, which is the order in which a lane's gradient is added, so no bit depends on it.

Between two passes a stage makes one `Exchange`: what the first has made, and what the second needs. No order of events
blocks for ever, even if an exchange ended only when each of its messages had met its other end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Kind = Literal["gpipe", "1f1b"]
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Pass:
    """The forward or backward pass of one of a replica's lanes, by its number among them."""

    direction: Direction
    number: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a stage sends once the pass before is over, and what it awaits for the next; either may be None.

    A forward pass's message is an activation, which goes to the next stage; a backward pass's is the gradient of one,
    which goes to the stage before.
    """

    sends: Pass | None
    awaits: Pass | None


Action = Pass | Exchange


@lru_cache(64)
def schedule(kind: Kind, stage: int, num_stages: int, num_lanes: int) -> tuple[Action, ...]:
    """Return what a stage does in a step, in order."""
    assert 0 <= stage < num_stages, f"no stage {stage} of {num_stages}"
    passes = passes_of(kind, stage, num_stages, num_lanes)
    befores: list[Pass | None] = [None, *passes]
    afters: list[Pass | None] = [*passes, None]
    actions: list[Action] = []
    for before, after in zip(befores, afters, strict=True):
        sends = before if before is not None and _has_next(before, stage, num_stages) else None
        awaits = after if after is not None and _has_last(after, stage, num_stages) else None
        if sends is not None or awaits is not None:
            actions.append(Exchange(sends, awaits))
        if after is not None:
            actions.append(after)
    return tuple(actions)


def passes_of(kind: Kind, stage: int, num_stages: int, num_lanes: int) -> list[Pass]:
    """Return a stage's passes, in order."""
    ahead = num_lanes if kind == "gpipe" else min(num_lanes, num_stages - 1 - stage)
    passes = [Pass("forward", number) for number in range(ahead)]
    for number in range(num_lanes):
        if ahead + number < num_lanes:
            passes.append(Pass("forward", ahead + number))
        passes.append(Pass("backward", number))
    return passes


def peak_lanes(passes: Sequence[Pass]) -> int:
    """Return how many lanes at most have had their forward pass, and still need what it kept for their backward one."""
    num_alive = most = 0
    for one in passes:
        num_alive += 1 if one.direction == "forward" else -1
        most = max(most, num_alive)
    return most


def bubble(num_stages: int, num_lanes: int) -> float:
    """Return which part of a step a stage waits for others, where all passes of a kind take as long: in both kinds."""
    return (num_stages - 1) / (num_lanes + num_stages - 1)


def _has_next(one: Pass, stage: int, num_stages: int) -> bool:
    """Say whether another stage goes on with what a pass has made."""
    return stage < num_stages - 1 if one.direction == "forward" else stage > 0


def _has_last(one: Pass, stage: int, num_stages: int) -> bool:
    """Say whether a pass begins with what another stage has made."""
    return stage > 0 if one.direction == "forward" else stage < num_stages - 1
