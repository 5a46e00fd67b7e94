"""Check and restore bitwise equality of weights: at a run's start, before a commit, after differing kernels."""

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
from elastic_train.job.gradient_norm import name_others
from elastic_train.job.resharding.reshard import give_state
from elastic_train.job.sharded.shared_weights import checksums, checksums_by_name
from elastic_train.job.state import AppliedState
from elastic_train.job.state_shards import StateShards
from elastic_train.parallel.group import Group


def differing_weights(group: Group, weights: Mapping[str, Tensor]) -> list[int]:
    """Return the ranks whose weights and buffers differ from rank 0's in any bit; equal on every rank."""
    if group.size == 1:
        return []
    seen = group.all_gather(torch.tensor(_checksum_of(weights))).flatten().tolist()
    return [rank for rank in range(group.size) if seen[rank] != seen[0]]


def _checksum_of(weights: Mapping[str, Tensor]) -> int:
    each = torch.tensor([checksum(tensor) for tensor in weights.values()], dtype=torch.int64)
    return zlib.crc32(each.numpy().tobytes())


def check_same_weights(group: Group, shards: StateShards, step: int) -> None:
    """Raise WeightsDifferError, on every rank, if ranks that share a weight or buffer have different bits of it.

    Called before a commit, since every rank writes a part of it. Costs a checksum of the weights and a few numbers per
    rank; nothing in a world of one. No rank's state may survive the error, because all have added gradients of all
    ranks.
    """
    if group.size == 1:
        return
    common = shards.table.weights_in_common
    mine = torch.zeros(max(map(len, common.of_rank)), dtype=torch.int64)
    sums = checksums(shards.share)
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
    """Describe which ranks of a set of shared weights differ, and the first tensor that differs."""
    common = shards.table.weights_in_common
    ranks = common.ranks[which]
    sums = [int(rows[rank, np.searchsorted(common.of_rank[rank], which)]) for rank in ranks]
    who, right = name_others(sums, ranks=ranks)
    where = ""
    # A rank that ends first is a lost peer to a later one, which must not keep its state for the next world either.
    with contextlib.suppress(PeerLostError):
        mine = checksums_by_name(shards.share, which)
        by_rank = [dict(found) for found in group.all_gather_objects(list(mine.items()))]
        names = [name for name in by_rank[right] if any(by_rank[rank][name] != by_rank[right][name] for rank in ranks)]
        where = f", first in '{names[0]}'" if names else ""
    return (
        f"step {step}: {who}{where}: a kernel is not deterministic, or a device computes wrongly. The last commit is "
        f"intact: all ranks end, and the next start continues from it. This is rank {group.rank} on "
        f"{socket.gethostname()}: leave out a machine that is named again and again"
    )


def begin_alike(group: Group, weights: Mapping[str, Tensor], announce: Callable[[str], None]) -> None:
    """Send the first rank's weights to the ranks of a group that begin a run with other ones."""
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
    """Send the first rank's state to the ranks of a column whose weights differ at the same step; return these ranks.

    Ranks at the same step of the same term have equal bits, because they apply the same reduced sums, unless their
    kernels round differently, which `reduction: fast` allows.
    """
    others = differing_weights(column, state.shards.share.weights())
    if others:
        give_state(column, state, others)
    return others
