"""Handing the applied state over, rank to rank: a world begins with the furthest step that any of its members holds.

Every rank says how far it has come and by which term; ranks that are not at the furthest place get the whole state
from one that is, in chunks, over the group, and take it over only when all has arrived as it was sent. So a fault in
the middle of a hand-over leaves every rank with the state that it had.

Two ranks at the same step of the same term hold the same bits: a term's ranks apply the same reduced sums. Where they
do so with kernels that round differently, which only `reduction: fast` allows, `level` makes them equal again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from elastic_train.job.state import AppliedState
from elastic_train.job.state_shards import Place, whole_from_furthest
from elastic_train.job.tree_transfer import give_tree, take_tree
from elastic_train.parallel.group import Group
from elastic_train.world.uniformity import differing_weights


def gather_places(group: Group, state: AppliedState, *, counts: bool = True) -> list[Place]:
    """Return every rank's place, by rank; a rank whose state does not count is where one that was just built is."""
    mine = state.place if counts else Place(0, 0)
    return _read_places(group.all_gather(torch.tensor([mine.step, mine.term])))


def _read_places(gathered: Tensor) -> list[Place]:
    return [Place(*row) for row in gathered.tolist()]


def hand_over(group: Group, state: AppliedState, places: Sequence[Place]) -> int | None:
    """Bring this rank to the furthest of the places; return the rank that it got the state from, None if it had it.

    Raises PeerLostError, with the state as it was, if a peer is lost or the state arrives damaged.
    """
    given_by = None
    for giver, taker in whole_from_furthest(places):
        if group.rank == giver:
            give_tree(group, state.shards.held(), state.reached, taker)
        elif group.rank == taker:
            received, reached = take_tree(group, giver)
            state.restore(lambda tree: tree.update(received), reached)  # noqa: B023 - called at once
            given_by = giver
    return given_by


def level(group: Group, state: AppliedState) -> list[int]:
    """Give rank 0's state to the ranks that hold other weights at the same place; return these, alike on every rank."""
    others = differing_weights(group, state.shards.weights())
    if others:
        mine = state.place
        hand_over(group, state, [Place(0, 0) if rank in others else mine for rank in range(group.size)])
    return others


def begin_alike(group: Group, weights: Mapping[str, Tensor], announce: Callable[[str], None]) -> None:
    """Give the weights of a group's first rank to those of it that begin a run with others."""
    others = differing_weights(group, weights)
    if not others:
        return
    announce(
        f"ranks {others} began with other weights than rank 0 and take its weights: the task draws them without "
        "torch's generator, or their machines round otherwise, so another run may not have them again"
    )
    for tensor in weights.values():
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        group.broadcast(content)
        with torch.no_grad():
            tensor.copy_(content.view(tensor.dtype).reshape(tensor.shape))
