"""States of tensors in pieces, cut in ways that hypothesis draws, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.writer import CommitWriter, Draft
from elastic_train.checkpoint.format.dcp import WrittenPart, live_contents, write_part
from elastic_train.checkpoint.format.layout import Planner, leaves_by_path
from elastic_train.checkpoint.format.state_tree import Pieces, Span, leaves_of
from elastic_train.checkpoint.stores.store import Store
from elastic_train.parallel.devices.squares import in_memory_order
from elastic_train.placement.grains import GRAIN, CutDims, cut_along
from tests.elastic_train.checkpoint.commit_samples import State, facts

shapes = st.lists(st.integers(0, 5) | st.just(1), max_size=4).map(torch.Size)
large_shapes = st.sampled_from([(3, GRAIN - 1), (GRAIN // 2, 5), (2, GRAIN), (GRAIN + 1,), (1, 2 * GRAIN + 1, 1), (7,)])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])


def numbered(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return a tensor with different elements, within the precision of its type."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << 20, tuple(shape), generator=generator).to(dtype)


@st.composite
def cuts(draw: st.DrawFn, size: int, num_writers: int, *, ends: Sequence[int] = ()) -> list[list[Span]]:
    """Draw each writer's spans, which together tile all elements; cuts are at `ends` only."""
    places = st.sampled_from(ends) if ends else st.integers(1, max(1, size - 1))
    edges = [0, *sorted(end for end in draw(st.sets(places, max_size=6)) if 0 < end < size), size]
    spans: list[list[Span]] = [[] for _ in range(num_writers)]
    for lo, hi in pairwise(edges):
        if lo < hi:
            spans[draw(st.integers(0, num_writers - 1))].append((lo, hi))
    return spans


def cut(whole: Tensor, written: Sequence[Sequence[Span]], held: Sequence[Span], along: int | None = None) -> Pieces:
    """Return the leaf of a rank that holds copies of some spans of a tensor, as views of a larger memory.

    Spans are of the elements in memory order, with the dimension `along` first.
    """
    memory, how = {}, cut_along(whole.shape, along)
    for lo, hi in held:
        around = torch.zeros(hi - lo + 3, dtype=whole.dtype)
        around[1 : hi - lo + 1] = in_memory_order(whole, how)[lo:hi]
        memory[lo, hi] = around[1 : hi - lo + 1]
    return Pieces(whole.dtype, whole.shape, memory, written, how)


def joined(spans: Sequence[Span]) -> list[Span]:
    """Join spans that touch: held spans are disjoint."""
    found: list[Span] = []
    for lo, hi in sorted(spans):
        if found and found[-1][1] == lo:
            lo = found.pop()[0]
        found.append((lo, hi))
    return found


def save_by(
    store: Store, commits: CommitWriter, states: Sequence[State], step: int = 1, dims: CutDims | None = None
) -> CommitRecord:
    """Publish the states of all ranks of a world, one after the other, each with its own plan."""
    planners = [Planner() for _ in states]
    all_leaves = [leaves_by_path(state) for state in states]
    plans = [
        planner.plan(state, leaves, len(states), dims)
        for planner, state, leaves in zip(planners, states, all_leaves, strict=True)
    ]
    assert all(plan == plans[0] for plan in plans), "a plan depends on what its rank holds"
    attempt = f"data/step-{step:012d}/00000001-{len(states)}"
    plain = planners[0].encode(plans[0], all_leaves[0])

    def write() -> list[WrittenPart]:
        return [
            write_part(store, attempt, part, live_contents(part, leaves), {} if place else plain)
            for place, (part, leaves) in enumerate(zip(plans[0].parts, all_leaves, strict=False))
        ]

    return commits.publish(Draft(attempt, plans[0], plain, facts(step), None), write)


def tensors_of(state: State) -> dict[tuple, Tensor]:
    """Return a state's whole tensors by path."""
    return {path: leaf for path, leaf in leaves_of(state) if isinstance(leaf, Tensor)}


def mapped(tree: object, change: Callable[[Tensor], object]) -> object:
    """Return a state with every tensor changed."""
    if isinstance(tree, dict):
        return {key: mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, list):
        return [mapped(value, change) for value in tree]
    return change(tree) if isinstance(tree, Tensor) else tree
