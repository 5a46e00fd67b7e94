"""What a rank of a cell takes from a commit: of each parameter its own moments."""

from __future__ import annotations

import copy

import torch

from elastic_train.checkpoint.format.layout import State, leaves_by_path
from elastic_train.core.mesh import Cell
from tests.elastic_train.job.cells.cell_jobs import build, enter, fingerprint, meet, train


def test_parameters_of_one_shape_have_their_own_moments_after_a_restore() -> None:
    """Norms and biases are alike in shape, so one's moments could stand for all: the next steps have the same bits."""
    ranks, alone = meet("restored", 0, 1, Cell()), Cell()
    state = build("none", cell=alone)
    enter(ranks, state, 0, 1)
    train(ranks, state, 4, 1)
    saved = copy.deepcopy(state.shards.held())

    def fill(tree: State) -> None:
        held = leaves_by_path(saved)
        for path, leaf in leaves_by_path(tree).items():
            if isinstance(leaf, torch.Tensor):
                leaf.copy_(held[path])  # type: ignore[arg-type]
        groups = saved["optimizer"]["param_groups"]  # type: ignore[index, call-overload]
        tree["optimizer"]["param_groups"] = groups  # type: ignore[index, call-overload]
        tree.update(scheduler=saved["scheduler"], scaler=saved["scaler"])

    again = build("none", cell=alone)
    enter(ranks, again, 0, 1)
    again.restore(fill, state.reached)
    tensors = [one for _, one in again.shards.tensors()]
    assert len({one.data_ptr() for one in tensors}) == len(tensors)
    for one in (state, again):
        train(ranks, one, 7, 1)
    assert fingerprint(ranks, again) == fingerprint(ranks, state)
