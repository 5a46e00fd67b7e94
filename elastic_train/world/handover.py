"""Handing the applied state over, rank to rank: a world begins with the furthest step that any of its members holds.

Every rank says how far it has come and by which term; ranks that are not at the furthest place get the whole state
from one that is, in chunks, over the group, and take it over only when its SHA-256 is right. So a fault in the middle
of a hand-over leaves every rank with the state that it had.

Two ranks at the same step of the same term hold the same bits: a term's ranks apply the same reduced sums. Where they
do so with kernels that round differently, which only `reduction: fast` allows, `level` makes them equal again.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from elastic_train.checkpoint.format.layout import State
from elastic_train.checkpoint.format.state_tree import fill, leaves_of, survey
from elastic_train.errors import PeerLostError
from elastic_train.job.state import AppliedState, Reached
from elastic_train.job.state_shards import Place, whole_from_furthest
from elastic_train.parallel.group import Group
from elastic_train.system.failpoints import reach
from elastic_train.world.uniformity import differing_weights

CHUNK_BYTES = 16 << 20


def place_of(state: AppliedState) -> Place:
    return Place(state.reached.step, state.reached.term)


def gather_places(group: Group, state: AppliedState, *, counts: bool = True) -> list[Place]:
    """Return every rank's place, by rank; a rank whose state does not count is where one that was just built is."""
    mine = place_of(state) if counts else Place(0, 0)
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
        mine = place_of(state)
        hand_over(group, state, [Place(0, 0) if rank in others else mine for rank in range(group.size)])
    return others


def give_tree(group: Group, tree: State, reached: Reached, taker: int) -> None:
    """Send a nested state and how far it is to one rank, which calls `take_tree`."""
    leaves = dict(leaves_of(tree))
    tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    shapes = [(path, tensor.shape, tensor.dtype) for path, tensor in tensors.items()]
    plain = {path: leaf for path, leaf in leaves.items() if path not in tensors}
    head = pickle.dumps((shapes, plain, survey(tree), reached))
    digest = hashlib.sha256(head)
    group.transfer(torch.tensor([len(head)]), to=taker)
    group.transfer(_as_tensor(digest.digest()), to=taker)
    group.transfer(_as_tensor(head), to=taker)
    reach("hand-over")
    for chunk in _chunks(list(tensors.values())):
        digest.update(chunk.numpy().data)
        group.transfer(chunk, to=taker)
    group.transfer(_as_tensor(digest.digest()), to=taker)


def take_tree(group: Group, giver: int) -> tuple[State, Reached]:
    """Return the nested state that one rank sends, and how far it is; PeerLostError if it arrives damaged."""
    length = torch.empty(1, dtype=torch.int64)
    group.transfer(length, source=giver)
    sent, head = (
        torch.empty(hashlib.sha256().digest_size, dtype=torch.uint8),
        torch.empty(int(length), dtype=torch.uint8),
    )
    group.transfer(sent, source=giver)
    group.transfer(head, source=giver)
    digest = hashlib.sha256(head.numpy().data)
    _check(sent, digest.digest(), giver)
    shapes, plain, (int_keyed, empty), reached = pickle.loads(head.numpy().tobytes())
    tensors = {path: torch.empty(shape, dtype=dtype) for path, shape, dtype in shapes}
    for chunk in _chunks(list(tensors.values()), is_filling=True):
        group.transfer(chunk, source=giver)
        digest.update(chunk.numpy().data)
    group.transfer(sent, source=giver)
    _check(sent, digest.digest(), giver)
    received: State = {}
    fill(received, {**plain, **tensors}, int_keyed, empty)
    return received, reached


def _check(sent: Tensor, found: bytes, giver: int) -> None:
    if sent.numpy().tobytes() != found:
        raise PeerLostError(f"the state that rank {giver} handed over arrived damaged")


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _chunks(tensors: Sequence[Tensor], *, is_filling: bool = False) -> Iterator[Tensor]:
    """Yield the tensors' bytes, on the CPU, in chunks of at most CHUNK_BYTES; small tensors share one.

    With `is_filling`, yield empty chunks, and copy what the caller has put into each back into the tensors.
    """
    pieces: list[Tensor] = []
    num_bytes = 0
    for piece in _pieces(tensors):
        if pieces and num_bytes + piece.numel() > CHUNK_BYTES:
            yield from _exchange(pieces, is_filling)
            pieces, num_bytes = [], 0
        pieces.append(piece)
        num_bytes += piece.numel()
    if pieces:
        yield from _exchange(pieces, is_filling)


def _exchange(pieces: Sequence[Tensor], is_filling: bool) -> Iterator[Tensor]:
    if not is_filling:
        yield torch.cat([piece.cpu() for piece in pieces])
        return
    chunk = torch.empty(sum(piece.numel() for piece in pieces), dtype=torch.uint8)
    yield chunk
    for piece, part in zip(pieces, torch.split(chunk, [piece.numel() for piece in pieces]), strict=True):
        piece.copy_(part)


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield views of the tensors' bytes, none longer than CHUNK_BYTES."""
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        yield from torch.split(flat, CHUNK_BYTES) if flat.numel() else ()
