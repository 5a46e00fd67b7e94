"""Weights that several ranks hold: their digest, their bitwise equality, and gathering them.

Equality is checked at a run's start and before a commit, and restored after differing kernels.
"""

from __future__ import annotations

import contextlib
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from isal.isal_zlib import crc32
from torch import Tensor

from elastic_train.checkpoint.format.dcp import SHA256_BYTES, checksum, digest_of, join_digests
from elastic_train.checkpoint.format.layout import bytes_of
from elastic_train.core.arrays import Int64s
from elastic_train.errors import PeerLostError, WeightsDifferError
from elastic_train.job.reshard import give_state
from elastic_train.job.sharded.held_tree import Held, spans_of
from elastic_train.job.sharded.share import Share
from elastic_train.job.state import AppliedState, name_others
from elastic_train.job.state_shards import StateShards
from elastic_train.parallel.group import Group
from elastic_train.placement.grains import Layout, digests_of, tensor_digests
from elastic_train.placement.table import Table


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


def checksums(share: Share) -> list[int]:
    """Return a checksum of each set of weights that this rank shares with the same other ranks, by `in_common`."""
    table = share.table
    by_name = (checksums_by_name(share, one) for one in table.weights_in_common.of_rank[table.rank].tolist())
    return [crc32(np.array(list(found.values()), dtype=np.int64).tobytes()) for found in by_name]


def checksums_by_name(share: Share, which: int) -> dict[str, int]:
    """Return the CRC-32 of this rank's part of each tensor in a set of weights; empty if it has none of the set."""
    table, found = share.table, dict[str, int]()
    set_of = table.weights_in_common.set_of
    grains = table.weights[table.rank][set_of[_numbers(table)] == which]
    for number, _, memory in _stretches(share, grains):
        name = share.layout.tensors[number].names[0]
        found[name] = crc32(_content(memory), found.get(name, 0))
    if set_of[-1] == which:
        found |= {name: crc32(_content(tensor)) for name, tensor in _buffers(share).items()}
    return found


def digest_of_all(shards: StateShards, group: Group | None = None) -> str:
    """Return the digest of all weights and buffers, on every rank; collective over the world.

    Each grain is hashed by one rank that has it. Without a group, return this rank's own digest, or "" if it has no
    seat yet or not all of the weights.
    """
    table = shards.table
    parts, is_alone = table.parts, table.has_all_weights
    if group is None and not (is_alone and table.is_held):
        return ""
    share = shards.share
    owned = [_numbers(table)] if is_alone else table.weights_owned()
    owned = [numbers[parts.is_saved[numbers]] for numbers in owned]
    mine = owned[0 if is_alone else table.rank]
    digests = dict(zip(mine.tolist(), _grain_digests(share, mine), strict=True))
    if group is not None and not is_alone:
        digests = _gathered(group, owned, digests)
    named = {name: digest_of(tensor) for name, tensor in _buffers(share).items()}
    tensors = [one for one in parts.layout.tensors if parts.is_saved[one.grains.start : one.grains.stop].all()]
    found = tensor_digests(Layout(tuple(tensors), parts.layout.flats), digests)
    return join_digests({name: one for name, one in found.items() if name in parts.saved} | named)


def make_whole(shards: StateShards, column: Group) -> None:
    """Gather the model's whole weights on rank 0, for use after training; collective over the world."""
    num_ranks, table = shards.table.cell.context, shards.table
    shards.share.make_whole(column, num_ranks)
    if shards.cut.cuts and (not table.shares_weights or column.rank < num_ranks):
        shards.cut.become_whole()


def _buffers(share: Share) -> Mapping[str, Tensor]:
    """Return the saved tensors that are not parameters, by name; every rank has them."""
    return {name: one for name, one in share.model.state_dict().items() if name not in share.layout.numbers}


def _numbers(table: Table) -> Int64s:
    """Return the model's grains whose weights this rank has."""
    return table.parts.numbers[table.part][table.weights[table.rank]]


def _stretches(share: Share, grains: Int64s) -> Iterator[tuple[int, Sequence[int], Tensor]]:
    """Yield, per run of adjacent grains, the tensor's number, the grains' bounds, and the memory."""
    for number, spans in spans_of(share.layout, Held(grains, share.table.sections())).items():
        bounds = share.layout.tensors[number].bounds
        for lo, hi in spans:
            first, last = np.searchsorted(bounds, [lo, hi]).tolist()
            yield number, [at - lo for at in bounds[first : last + 1]], share.weights_at(number, lo, hi)


def _grain_digests(share: Share, numbers: Int64s) -> Iterator[bytes]:
    """Yield the SHA-256 of this rank's grains, in order."""
    table = share.table
    grains = np.flatnonzero(np.isin(table.parts.numbers[table.part], numbers, assume_unique=True))
    for _, bounds, tensor in _stretches(share, grains):
        yield from digests_of(_content(tensor), tensor.dtype.itemsize, bounds)


def _gathered(group: Group, owned: list[Int64s], mine: Mapping[int, bytes]) -> dict[int, bytes]:
    """All-gather the digests of all grains, by number; each rank contributes those of the grains it owns."""
    rows = torch.zeros(max(1, *(numbers.size for numbers in owned)), SHA256_BYTES, dtype=torch.uint8)
    for place, digest in enumerate(mine.values()):
        rows[place] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    gathered = group.all_gather(rows).numpy()
    return {
        number: gathered[rank, place].tobytes()
        for rank, numbers in enumerate(owned)
        for place, number in enumerate(numbers.tolist())
    }


def _content(tensor: Tensor) -> memoryview:
    return bytes_of(tensor.detach().cpu().contiguous())
