"""Weights that no rank holds as a whole: their digest, whether copies agree, and the whole model on one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from elastic_train.checkpoint.format.torch_frame import bytes_of
from elastic_train.checkpoint.format.weights_digest import checksum, digest_of, join_digests
from elastic_train.core.arrays import Int64s
from elastic_train.errors import WeightsDifferError
from elastic_train.parallel.group import Group
from elastic_train.placement.digest import tensor_digests
from elastic_train.placement.grains import Layout
from elastic_train.placement.holdings import Run
from elastic_train.placement.seating import Seating

GrainAt = Callable[[int], Tensor]
"""Returns this rank's memory of a grain that it holds, by its number, without padding."""


def grain_run(layout: Layout, number: int) -> Run:
    """Return where a grain is, without its padding."""
    start, length = int(layout.start[number]), int(layout.hi[number] - layout.lo[number])
    return Run(int(layout.flat_of[number]), start, start + length)


def saved_grains(layout: Layout, names: Collection[str]) -> npt.NDArray[np.bool_]:
    """Return which grains are of tensors that commits hold, by any of their `names`; shape (grains,)."""
    is_saved = [any(name in names for name in one.names) for one in layout.tensors]
    return np.array(is_saved, dtype=np.bool_)[layout.tensor_of]


def shared_digest(
    group: Group, seating: Seating, grain_at: GrainAt, names: Collection[str], buffers: Mapping[str, Tensor]
) -> str:
    """Return, on every rank, the digest of the weights of some `names`, and of `buffers`: each grain is hashed by one
    of its holders."""
    layout = seating.layout
    is_saved = saved_grains(layout, names)
    owned = [grains[is_saved[grains]] for grains in seating.all_owned()]
    mine = torch.zeros(max(1, *(grains.size for grains in owned)), 32, dtype=torch.uint8)
    for place, number in enumerate(owned[group.rank].tolist()):
        grain = grain_at(number)
        digest = hashlib.sha256(bytes_of(grain.detach().cpu().contiguous())).digest()
        mine[place] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    rows = group.all_gather(mine).numpy()
    digests = {
        number: rows[rank, place].tobytes()
        for rank, grains in enumerate(owned)
        for place, number in enumerate(grains.tolist())
    }
    named = {name: digest_of(tensor) for name, tensor in buffers.items()}
    saved = Layout(
        tuple(one for one in layout.tensors if is_saved[one.grains.start : one.grains.stop].all()), layout.flats
    )
    return join_digests({name: one for name, one in tensor_digests(saved, digests).items() if name in names} | named)


def check_copies(group: Group, seating: Seating, grain_at: GrainAt, names: Collection[str], step: int) -> None:
    """Raise WeightsDifferError, on every rank, if two holders of a grain have different weights of some `names`."""
    is_saved = saved_grains(seating.layout, names)
    held = [grains[is_saved[grains]] for grains in seating.holdings]
    most = max(1, *(grains.size for grains in held))
    mine = torch.full((most,), -1, dtype=torch.int64)
    own = held[seating.rank]
    mine[: own.size] = torch.tensor([checksum(grain_at(number)) for number in own.tolist()])
    rows = group.all_gather(mine).numpy()
    known: Int64s = np.full(seating.layout.num_grains, -1, dtype=np.int64)
    for rank, grains in enumerate(held):
        row = rows[rank, : grains.size]
        others = grains[(known[grains] != row) & (known[grains] != -1)]
        if others.size:
            name = seating.layout.tensors[seating.layout.tensor_of[others[0]]].names[0]
            raise WeightsDifferError(
                f"step {step}: rank {rank} and another copy's holder have different weights, first in '{name}': a "
                "kernel is not deterministic, or memory is damaged. The last commit is intact: all ranks end, and the "
                "next start continues from it"
            )
        known[grains] = row


def gather_whole(
    group: Group,
    seating: Seating,
    held: Callable[[Run], Tensor],
    whole: Callable[[Run], Tensor],
    num_ranks: int = 1,
) -> None:
    """Fill the whole weights on the first ranks, which must have memory for them, from one holder of each grain."""
    runs = [seating.runs_at(rank, grains) for rank, grains in enumerate(seating.all_owned())]
    mine, is_first = runs[group.rank], group.rank < num_ranks
    for run in mine if is_first else ():
        whole(run).copy_(held(run))
    others = [rank for rank in range(group.size) if rank != group.rank]
    group.exchange(
        [(to, held(run)) for to in others if to < num_ranks for run in mine],
        [(giver, whole(run)) for giver in others for run in runs[giver]] if is_first else [],
    )
