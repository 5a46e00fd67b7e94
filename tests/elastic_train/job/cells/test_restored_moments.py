"""A rank of a cell restores from a commit each parameter's own moments."""

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


def test_parameters_of_one_shape_have_their_own_moments_after_a_restore() -> None:
    """Norms and biases have equal shapes and could be confused; the next steps have the same bits."""
    assert in_memory(restored, 2) == [(True, True)] * 2
