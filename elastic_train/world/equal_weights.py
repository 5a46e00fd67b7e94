"""Ranks that hold the same weights, to the last bit: as a run begins, before a commit, after kernels that differ."""

from __future__ import annotations

import contextlib
import socket
import zlib
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from elastic_train.checkpoint.format.weights_digest import checksum
from elastic_train.core.arrays import Int64s
from elastic_train.errors import PeerLostError, WeightsDifferError
from elastic_train.job.majority import name_others
from elastic_train.job.resharding import give_state
from elastic_train.job.sharded.shared_weights import checksums, checksums_by_name
from elastic_train.job.state import AppliedState
from elastic_train.job.state_shards import StateShards
from elastic_train.parallel.group import Group


def differing_weights(group: Group, weights: Mapping[str, Tensor]) -> list[int]:
    """Return, alike on every rank, the ranks whose weights and buffers are not rank 0's bit for bit."""
    if group.size == 1:
        return []
    seen = group.all_gather(torch.tensor(_checksum_of(weights))).flatten().tolist()
    return [rank for rank in range(group.size) if seen[rank] != seen[0]]


def _checksum_of(weights: Mapping[str, Tensor]) -> int:
    each = torch.tensor([checksum(tensor) for tensor in weights.values()], dtype=torch.int64)
    return zlib.crc32(each.numpy().tobytes())


def check_same_weights(group: Group, shards: StateShards, step: int) -> None:
    """Raise WeightsDifferError, on every rank, if two ranks have other bits of a weight or buffer that both have.

    Called before a commit begins, of which every rank writes a part. Costs a checksum of the weights, and a few numbers
    a rank; nothing in a world of one. No rank's state may outlive the error: all have added up gradients of all ranks.
    """
    if group.size == 1:
        return
    common = shards.table.weights_in_common
    mine = torch.zeros(max(map(len, common.of_rank)), dtype=torch.int64)
    sums = checksums(shards.table, shards.share.weights_at, shards.buffers())
    mine[: len(sums)] = torch.tensor(sums)
    rows = group.all_gather(mine).numpy()
    known = np.full(len(common.ranks), -1, dtype=np.int64)
    for rank, sets in enumerate(common.of_rank):
        row = rows[rank, : sets.size]
        others = sets[(known[sets] != row) & (known[sets] != -1)]
        if others.size:
            raise WeightsDifferError(_describe_others(group, shards, int(others[0]), rows, step))
        known[sets] = row


def _describe_others(group: Group, shards: StateShards, which: int, rows: Int64s, step: int) -> str:
    """Say which of the ranks with a set of weights in common have other ones, and the first tensor that differs."""
    common = shards.table.weights_in_common
    ranks = common.ranks[which]
    sums = [int(rows[rank, np.searchsorted(common.of_rank[rank], which)]) for rank in ranks]
    who, right = name_others(sums, ranks=ranks)
    where = ""
    # A rank that ends is a lost peer to one that is later here: that one must not keep its state for the next world.
    with contextlib.suppress(PeerLostError):
        mine = checksums_by_name(shards.table, which, shards.share.weights_at, shards.buffers())
        by_rank = [dict(found) for found in group.all_gather_objects(list(mine.items()))]
        names = [name for name in by_rank[right] if any(by_rank[rank][name] != by_rank[right][name] for rank in ranks)]
        where = f", first in '{names[0]}'" if names else ""
    return (
        f"step {step}: {who}{where}: a kernel is not deterministic, or a device computes wrongly. The last commit is "
        f"intact: all ranks end, and the next start continues from it. This is rank {group.rank} on "
        f"{socket.gethostname()}: leave out a machine that is named again and again"
    )


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


def level(column: Group, state: AppliedState) -> list[int]:
    """Give the first rank's state to those of a column that hold other weights at the same place; return these.

    Two ranks at the same step of the same term hold the same bits: a term's ranks apply the same reduced sums. Only
    where they do so with kernels that round differently, which `reduction: fast` allows, they do not.
    """
    others = differing_weights(column, state.shards.share.weights())
    if others:
        give_state(column, state, others)
    return others
