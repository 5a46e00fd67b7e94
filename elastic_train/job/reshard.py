"""Reshard the state: move what ranks hold of the furthest step to the ranks whose new seats need it.

All ranks of a column compute the same transfer plan (`recut`). State that is equal on all ranks (everything, if each
holds its part whole) is sent as one tree to each rank that is behind. A rank takes its seat only once everything for it
has arrived, and retains its old shard until all ranks have taken their seats. A fault during resharding therefore
leaves every shard with its old holders, its new holders, or both.

All ranks of a cell have the same seat number, each in its own column. So they compute the same lanes if these are
assigned by seat, and each knows the holders in all columns. If several ranks of a cell hold the same part (context
parallelism), those with the same tokens share a seat. Columns reshard independently, to the step that all agreed on.

A tree's structure is unpickled only after its SHA-256 matches. Its tensors come in chunks, each with a CRC-32, as
resharded data does: that detects damage by memory or a connection, and SHA-256 would be slower than the link.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from elastic_train.checkpoint.format.dcp import checksum
from elastic_train.checkpoint.format.layout import State
from elastic_train.checkpoint.format.state_tree import fill, leaves_of, survey
from elastic_train.core.arrays import Int64s, filled
from elastic_train.core.mesh import Mesh, ranks_by_part
from elastic_train.errors import PeerLostError
from elastic_train.job.peer_states import PeerState, all_arcs_of, by_column
from elastic_train.job.sharded.held_tree import HeldRun, Retained, is_within, keep
from elastic_train.job.sharded.share import Share
from elastic_train.job.state import AppliedState, TrainProgress
from elastic_train.job.state_shards import Place, StateShards, Weights
from elastic_train.parallel.exchange import messages_of
from elastic_train.parallel.group import Group
from elastic_train.placement.arcs import Arc, paths_of_cells
from elastic_train.placement.holdings import grains_in_each
from elastic_train.placement.seating import Move, Recut, Seating, plan_recut
from elastic_train.placement.seats import Seat, seats_of_cells, seats_of_holders
from elastic_train.placement.table import Table
from elastic_train.system.failpoints import reach
from elastic_train.system.huge_pages import on_huge_pages


class Taken(NamedTuple):
    """Lost grains of this rank's column, and the rank that sent the common state, if any."""

    lost: Int64s
    given_by: int | None = None


_NOTHING: Int64s = np.empty(0, dtype=np.int64)
CHUNK_BYTES = 16 << 20


def take_place(state: AppliedState, mesh: Mesh, cell: Group | None, first: Callable[[], Weights]) -> bool:
    """Take the place that a world assigns to this rank; return True if it has no state there.

    It then drops what it has of another part. `cell` and `first` are as in `StateShards.enter`.
    """
    if is_new := state.shards.enter(mesh, cell, first):
        state.begin_again()
    return is_new


def take_state(column: Group, state: AppliedState, brought: Sequence[PeerState]) -> Taken:
    """Bring this rank to the furthest step, with its new seat; `brought` has the states of all ranks of the world.

    Changes nothing if grains are lost. Raises PeerLostError, with state and seat unchanged, if a peer is lost or data
    arrives damaged.
    """
    shards, furthest = state.shards, max(one.place for one in brought)
    share = shards.share
    of_column = by_column(shards.table, brought)[shards.table.part]
    if is_first(shards.table, of_column):  # another column may have seats; newcomers replaced all ranks of this one
        take_first_seat(column, shards, brought, begins=True)
        return Taken(_NOTHING)
    is_furthest = [one.place == furthest for one in of_column]
    table = _table(shards, column, brought, furthest)
    plan = Recut() if table.is_whole else _plan_of(of_column, share, furthest, table.seating())
    if plan.lost.size:
        return Taken(plan.lost)
    old = [*share.runs, *share.retained.runs] if is_furthest[column.rank] else []
    runs = share.runs_for(table, old)
    reach("hand-over")
    arrived = _move(column, share, table, plan, runs, old)
    giver = _giver_to(column.rank, is_furthest)
    given = _exchange_alike(column, state, share, is_furthest)
    # Everything for this seat has arrived.
    for one in runs:
        keep(one, old)
    for memory, weights in arrived:
        memory.copy_(weights)
    counts = None
    if given is not None:
        counts = state.adopt(*given)
    arcs = _arcs_at(of_column[column.rank], furthest)
    share.sit(table, runs, counts, Retained(arcs, tuple(one for one in old if not is_within(one.run, runs))))
    reach("hand-over")
    if share.circle.length:  # the column is sharded
        column.barrier()
    # Everything for all other ranks, too, so retained shards are no longer needed.
    share.retained = Retained()
    share.refresh(column, everything=True)
    return Taken(_NOTHING, giver)


def is_first(table: Table, brought: Sequence[PeerState]) -> bool:
    """Return True if ranks have only the initial weights, whole on each of them."""
    is_shared_out = table.shares_weights and any(one.seat is not None for one in brought)
    return max(one.place for one in brought).step == 0 and not is_shared_out


def take_first_seat(column: Group, shards: StateShards, brought: Sequence[PeerState], *, begins: bool = False) -> None:
    """Take the seat of a world without updates, which starts from the initial weights or a commit."""
    share, table = shards.share, _table(shards, column, brought, None)
    runs = share.runs_for(table)
    share.begin(runs, from_commit=not begins)
    share.sit(table, runs, [0.0] * len(share.optimizer.param_groups))


def give_state(column: Group, state: AppliedState, takers: Sequence[int]) -> None:
    """Send the state of the other ranks, at the current step, to `takers`; each rank holds the whole part."""
    share = state.shards.share
    given = _exchange_alike(column, state, share, [rank not in takers for rank in range(column.size)])
    if given is not None:
        state.adopt(*given)


def _table(shards: StateShards, column: Group, brought: Sequence[PeerState], furthest: Place | None) -> Table:
    """Return the assignment of the new world; current seats count at the `furthest` step, and not at all if it is None.

    A cell gets no shards if one of its ranks may not hold any, unless no cell may. A cell with several seats is its
    own, narrowest failure domain: losing a rank loses the whole cell.
    """
    table, seats, context = shards.table, list[Seat](), shards.table.cell.context
    if table.is_whole:
        pass
    elif table.cell.size == 1:
        seats = seats_at(brought, table.copies, furthest)
    else:
        seated = list(zip(*by_column(shards.table, brought), strict=True))
        able = [all(one.may_hold for one in ranks) for ranks in seated]
        before = [_seats_of(of_column, furthest) for of_column in by_column(shards.table, brought)]
        paths = paths_of_cells([[one.path for one in ranks] for ranks in seated])
        if context > 1:
            paths = [(*path, str(number // context)) for number, path in enumerate(paths)]
        seats = seats_of_cells(paths, table.copies, before, able if any(able) else [True] * len(seated))
    rank = ranks_by_part(len(brought), table.cell)[table.part][column.rank]
    return replace(table, seats=seats, rank=rank, size=len(brought))


def seats_at(brought: Sequence[PeerState], copies: int, furthest: Place | None) -> list[Seat]:
    """Return every rank's seat in a world without cells."""
    may_hold = [one.may_hold for one in brought]
    return seats_of_holders([one.path for one in brought], copies, _seats_of(brought, furthest), may_hold)


def _seats_of(brought: Sequence[PeerState], furthest: Place | None) -> list[Seat | None]:
    return [one.seat if one.place == furthest else None for one in brought]


def _plan_of(brought: Sequence[PeerState], share: Share, furthest: Place, seating: Seating) -> Recut:
    """Return the transfer plan, the same on all ranks."""
    have = grains_in_each(share.circle, [_arcs_at(one, furthest) for one in brought])
    return plan_recut(have, seating.holdings, share.layout.span)


def _move(
    group: Group,
    share: Share,
    table: Table,
    plan: Recut,
    runs: Sequence[HeldRun],
    old: Sequence[HeldRun],
) -> list[tuple[Tensor, Tensor]]:
    """Send and receive shards as planned, into `runs`; return pairs of a weight tensor and its new value.

    If weights are whole on every rank, the old weights stay in that memory until the new seat is taken.
    """
    arrived: list[tuple[Tensor, Tensor]] = []

    def tensors(one: Move) -> Iterator[Tensor]:
        for run in one.runs:
            held = share.cut_out(old if group.rank == one.giver else runs, run)
            weights = held.weights
            if group.rank == one.taker and not share.table.shares_weights:
                weights = on_huge_pages(torch.empty_like(weights))
                arrived.append((held.weights, weights))
            yield weights
            yield from (moment for _, moment in sorted(held.moments.items()) if moment.numel())

    own = [one for one in plan.transfers if group.rank in one[:2]]
    moves = [Move(giver, taker, table.seating().runs_at(taker, grains)) for giver, taker, grains in own]
    sends, receives = messages_of(moves, group.rank, tensors)
    if sends or receives:
        group.exchange(sends, receives)
        _check(group, sends, receives)
    return arrived


def _check(group: Group, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
    """Exchange and compare checksums; raise PeerLostError if received data is damaged."""
    given, taken = _checksums(sends), _checksums(receives)
    told = {rank: torch.empty_like(sums) for rank, sums in taken.items()}
    group.exchange(list(given.items()), list(told.items()))
    for rank, sums in taken.items():
        if not torch.equal(sums, told[rank]):
            raise PeerLostError(f"the shards that rank {rank} handed over arrived damaged")


def _checksums(tensors: Sequence[tuple[int, Tensor]]) -> dict[int, Tensor]:
    """Return the checksums of tensors, in order, by peer rank."""
    sums: dict[int, list[int]] = {}
    for rank, tensor in tensors:
        sums.setdefault(rank, []).append(checksum(tensor))
    return {rank: torch.tensor(found) for rank, found in sums.items()}


def _arcs_at(one: PeerState, furthest: Place) -> tuple[Arc, ...]:
    """Return the arcs that a rank has at the furthest step; those of another step would mix two models."""
    return all_arcs_of(one) if one.place == furthest else ()


def _giver_to(rank: int, is_furthest: Sequence[bool]) -> int | None:
    """Return the rank that sends the common state to `rank`; None if it is at the furthest step.

    Ranks at the furthest step take turns as senders.
    """
    givers = [one for one, is_it in enumerate(is_furthest) if is_it]
    takers = [one for one, is_it in enumerate(is_furthest) if not is_it]
    return givers[takers.index(rank) % len(givers)] if rank in takers else None


def _exchange_alike(
    column: Group, state: AppliedState, share: Share, is_furthest: Sequence[bool]
) -> tuple[State, TrainProgress] | None:
    """Send the common state from ranks at the furthest step to the others; return it on a receiver, else None."""
    given = None
    for taker in range(column.size):
        giver = _giver_to(taker, is_furthest)
        if giver == column.rank:
            give_tree(column, share.common(), state.reached, taker)
        elif giver is not None and taker == column.rank:
            given = take_tree(column, giver)
    return given


def give_tree(group: Group, tree: State, reached: TrainProgress, taker: int) -> None:
    """Send a nested state and its progress to one rank, which calls `take_tree`."""
    leaves = dict(leaves_of(tree))
    tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    shapes = [(path, tensor.shape, tensor.dtype) for path, tensor in tensors.items()]
    plain = {path: leaf for path, leaf in leaves.items() if path not in tensors}
    head = pickle.dumps((shapes, plain, survey(tree), reached))
    group.transfer(torch.tensor([len(head)]), to=taker)
    group.transfer(_as_tensor(hashlib.sha256(head).digest()), to=taker)
    group.transfer(_as_tensor(head), to=taker)
    reach("hand-over")
    sums = []
    for chunk in _chunks(list(tensors.values())):
        sums.append(checksum(chunk))
        group.transfer(chunk, to=taker)
    group.transfer(torch.tensor([len(sums), *sums]), to=taker)


def take_tree(group: Group, giver: int) -> tuple[State, TrainProgress]:
    """Receive a nested state and its progress from one rank; raise PeerLostError if it arrives damaged."""
    length = torch.empty(1, dtype=torch.int64)
    group.transfer(length, source=giver)
    sent, head = (
        torch.empty(hashlib.sha256().digest_size, dtype=torch.uint8),
        torch.empty(int(length), dtype=torch.uint8),
    )
    group.transfer(sent, source=giver)
    group.transfer(head, source=giver)
    _check_tree(sent.numpy().tobytes() == hashlib.sha256(head.numpy().data).digest(), giver)
    shapes, plain, (int_keyed, empty), reached = pickle.loads(head.numpy().tobytes())
    tensors = {path: torch.empty(shape, dtype=dtype) for path, shape, dtype in shapes}
    sums = []
    for chunk in _chunks(list(tensors.values()), is_filling=True):
        group.transfer(chunk, source=giver)
        sums.append(checksum(chunk))
    expected = torch.empty(1 + len(sums), dtype=torch.int64)
    group.transfer(expected, source=giver)
    _check_tree(expected.tolist() == [len(sums), *sums], giver)
    received: State = {}
    fill(received, {**plain, **tensors}, int_keyed, empty)
    return received, reached


def _check_tree(is_as_sent: bool, giver: int) -> None:
    if not is_as_sent:
        raise PeerLostError(f"the state that rank {giver} handed over arrived damaged")


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _chunks(tensors: Sequence[Tensor], *, is_filling: bool = False) -> Iterator[Tensor]:
    """Yield the tensors' bytes, on the CPU, in chunks of at most CHUNK_BYTES; small tensors share a chunk.

    All chunks use the same memory, to avoid page faults: a chunk is valid until the next one. With `is_filling`, yield
    empty chunks and copy what the caller writes into them back to the tensors.
    """
    room = torch.empty(min(CHUNK_BYTES, sum(tensor.nbytes for tensor in tensors)), dtype=torch.uint8)
    flats = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel())
    every = (piece for flat in flats for piece in torch.split(flat, CHUNK_BYTES))
    for pieces in filled(every, Tensor.numel, CHUNK_BYTES):
        sizes = [piece.numel() for piece in pieces]
        chunk = room[: sum(sizes)]
        parts = torch.split(chunk, sizes)
        if not is_filling:
            for piece, part in zip(pieces, parts, strict=True):
                part.copy_(piece)
        yield chunk
        if is_filling:
            for piece, part in zip(pieces, parts, strict=True):
                piece.copy_(part)
