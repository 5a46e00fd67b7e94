"""A rank of a cell writes the part of each tensor that it holds, and restores each parameter's own moments."""

from __future__ import annotations

import copy

import torch

from elastic_train.checkpoint.format.layout import State, leaves_by_path, weight_of
from elastic_train.checkpoint.format.pieces import Pieces
from tests.elastic_train.job.cells.cell_jobs import build, enter, fingerprint, meet, train
from tests.memory_machine import in_memory


def restored(rank: int, size: int) -> tuple[bool, bool]:
    """Train on from the live state, and from the same state restored into a new one."""
    ranks = meet("restored", rank, size)
    state = build("none")
    enter(ranks, state, rank, 1)
    train(ranks, state, 4, 1)
    saved = copy.deepcopy(state.shards.share.held())

    def fill(tree: State) -> None:
        held = leaves_by_path(saved)
        for path, leaf in leaves_by_path(tree).items():
            if isinstance(leaf, Pieces):
                [memory] = leaf.held.values()
                memory.copy_(state.shards.cut.cuts[weight_of(path) or ""].in_memory(held[path]))  # type: ignore[arg-type]
            elif isinstance(leaf, torch.Tensor):
                leaf.copy_(held[path])  # type: ignore[arg-type]
        groups = saved["optimizer"]["param_groups"]  # type: ignore[index, call-overload]
        tree["optimizer"]["param_groups"] = groups  # type: ignore[index, call-overload]
        tree.update(scheduler=saved["scheduler"], scaler=saved["scaler"])

    again = build("none")
    enter(ranks, again, rank, 1)
    again.restore(fill, state.reached)
    tensors = [one for _, one in again.shards.tensors()]
    for one in (state, again):
        train(ranks, one, 7, 1)
    is_apart = len({one.data_ptr() for one in tensors}) == len(tensors)
    return is_apart, fingerprint(ranks, again) == fingerprint(ranks, state)


def written(rank: int, size: int) -> dict[object, list[object]]:
    """Return the spans of each cut tensor that each rank writes, by path; this rank holds what it writes."""
    ranks, state = meet("written", rank, size), build("none")
    enter(ranks, state, rank, 1)
    assert list(state.pieces.assign(range(size))) == list(range(size))
    cut = {path: leaf for path, leaf in leaves_by_path(state.pieces.tree()).items() if isinstance(leaf, Pieces)}
    for leaf in cut.values():
        assert all(any(lo <= first and end <= hi for lo, hi in leaf.held) for first, end in leaf.written[rank])
    return {path: [leaf.shape.numel(), *leaf.written] for path, leaf in cut.items()}


def test_ranks_of_two_cells_write_each_element_of_a_cut_tensor_once() -> None:
    first, *others = in_memory(written, 4)
    assert first and others == [first] * 3
    for numel, *by_rank in first.values():
        spans = sorted(span for spans in by_rank for span in spans)  # type: ignore[attr-defined]
        assert [lo for lo, _ in spans] == [0, *(hi for _, hi in spans[:-1])] and spans[-1][1] == numel


def test_parameters_of_one_shape_have_their_own_moments_after_a_restore() -> None:
    """Norms and biases have equal shapes and could be confused; the next steps have the same bits."""
    assert in_memory(restored, 2) == [(True, True)] * 2
