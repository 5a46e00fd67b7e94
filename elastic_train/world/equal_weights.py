"""Ranks that hold the same weights, to the last bit: as a run begins, before a commit, after kernels that differ."""

from __future__ import annotations

import contextlib
import socket
import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from elastic_train.checkpoint.format.weights_digest import checksum
from elastic_train.errors import PeerLostError, WeightsDifferError
from elastic_train.job.majority import name_others
from elastic_train.job.resharding import give_state
from elastic_train.job.state import AppliedState
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


def check_same_weights(group: Group, weights: Mapping[str, Tensor], step: int) -> None:
    """Raise WeightsDifferError, on every rank, if not all ranks hold the same weights and buffers bit for bit.

    Called before a commit begins, of which every rank writes a part. Costs a checksum of the weights, and one number a
    rank; nothing in a world of one. No rank's state may outlive the error: all have added up gradients of all ranks.
    """
    if group.size == 1:
        return
    mine = torch.tensor([checksum(tensor) for tensor in weights.values()], dtype=torch.int64)
    whole = zlib.crc32(mine.numpy().tobytes())
    seen = group.all_gather(torch.tensor(whole)).flatten()
    if bool((seen == seen[0]).all()):
        return
    who, right = name_others(seen.tolist())
    where = ""
    # A rank that ends is a lost peer to one that is later here: that one must not keep its state for the next world.
    with contextlib.suppress(PeerLostError):
        rows = group.all_gather(mine)
        is_other = (rows != rows[right]).any(0)
        where = f", first in '{list(weights)[int(is_other.nonzero()[0])]}'"
    raise WeightsDifferError(
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
