"""Weights that several ranks hold: their digest, their equality, and gathering them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from isal.isal_zlib import crc32
from torch import Tensor

from elastic_train.checkpoint.format.torch_frame import bytes_of
from elastic_train.checkpoint.format.weights_digest import SHA256_BYTES, digest_of, join_digests
from elastic_train.core.arrays import Int64s
from elastic_train.job.sharded.held_tree import Held, spans_of
from elastic_train.job.sharded.share import Share
from elastic_train.job.state_shards import StateShards
from elastic_train.parallel.group import Group
from elastic_train.placement.grains import Layout, digests_of, tensor_digests
from elastic_train.placement.table import Table


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
