"""A nested state on its way from one rank to another: its leaves in chunks, used only if their SHA-256 is right."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from elastic_train.checkpoint.format.layout import State
from elastic_train.checkpoint.format.state_tree import fill, leaves_of, survey
from elastic_train.errors import PeerLostError
from elastic_train.job.state import Reached
from elastic_train.parallel.group import Group
from elastic_train.system.failpoints import reach

CHUNK_BYTES = 16 << 20


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
