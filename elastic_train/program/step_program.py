"""What a rank does in a step, in order: passes of its stage, what they exchange, and where leaves begin and end.

A program speaks of turns, by number: which lane a turn is, if any, is up to the rank. One without a lane goes through
the same actions, and takes part in what others' lanes need.

A leaf begins before what it needs whole is gathered, and ends once all of it is added here or on its way to those that
add it. Where a model is in one stage that is around both of its passes; in a pipeline lanes overlap, weights stay for
the step, and it is around the backward pass alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from elastic_train.program.schedules import Exchange, Pass, Pipeline, schedule


@dataclass(frozen=True, slots=True)
class Open:
    """A turn's leaf of a chunk begins: its gradients are zero, and what it needs is gathered from here on."""

    number: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Close:
    """A turn's leaf of a chunk ends: all of its gradients are added here, or are where they are added."""

    number: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class AddExperts:
    """Add what the lanes of a turn have given to this rank's experts of a chunk."""

    number: int
    chunk: int = 0


Action = Pass | Exchange | Open | Close | AddExperts


@lru_cache(64)
def step_program(pipeline: Pipeline, stage: int, *, has_experts: bool = False) -> tuple[Action, ...]:
    """Return what a rank of a stage does in a step of as many turns as the pipeline has lanes."""
    return tuple(_with_leaves(pipeline, stage, has_experts=has_experts))


def _with_leaves(pipeline: Pipeline, stage: int, *, has_experts: bool) -> Iterator[Action]:
    first = "forward" if pipeline.num_stages == 1 else "backward"
    if pipeline.num_stages == 1:
        pipeline = pipeline._replace(kind="1f1b")  # no lane waits for other stages
    for action in schedule(pipeline, stage):
        if isinstance(action, Exchange):
            yield action
            continue
        if action.direction == first:
            yield Open(action.number, action.chunk)
        yield action
        if action.direction == "backward":
            yield Close(action.number, action.chunk)
            if has_experts:
                yield AddExperts(action.number, action.chunk)
