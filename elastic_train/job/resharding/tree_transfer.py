"""Send a nested state from one rank to another, and use it only if everything arrived intact.

Its structure is unpickled only after its SHA-256 matches. Tensors come in chunks, each with a CRC-32, as resharded data
does: that detects damage by memory or a connection, and SHA-256 would be slower than the link.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from elastic_train.checkpoint.format.layout import State
from elastic_train.checkpoint.format.state_tree import fill, leaves_of, survey
from elastic_train.checkpoint.format.weights_digest import checksum
from elastic_train.errors import PeerLostError
from elastic_train.job.state import TrainProgress
from elastic_train.parallel.group import Group
from elastic_train.system.failpoints import reach

CHUNK_BYTES = 16 << 20


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
    _check(sent.numpy().tobytes() == hashlib.sha256(head.numpy().data).digest(), giver)
    shapes, plain, (int_keyed, empty), reached = pickle.loads(head.numpy().tobytes())
    tensors = {path: torch.empty(shape, dtype=dtype) for path, shape, dtype in shapes}
    sums = []
    for chunk in _chunks(list(tensors.values()), is_filling=True):
        group.transfer(chunk, source=giver)
        sums.append(checksum(chunk))
    expected = torch.empty(1 + len(sums), dtype=torch.int64)
    group.transfer(expected, source=giver)
    _check(expected.tolist() == [len(sums), *sums], giver)
    received: State = {}
    fill(received, {**plain, **tensors}, int_keyed, empty)
    return received, reached


def _check(is_as_sent: bool, giver: int) -> None:
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
    for pieces in _shared_out(tensors):
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


def _shared_out(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of views of the tensors' bytes, each of at most CHUNK_BYTES in total."""
    pieces: list[Tensor] = []
    num_bytes = 0
    for piece in _pieces(tensors):
        if pieces and num_bytes + piece.numel() > CHUNK_BYTES:
            yield pieces
            pieces, num_bytes = [], 0
        pieces.append(piece)
        num_bytes += piece.numel()
    if pieces:
        yield pieces


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield views of the tensors' bytes, none longer than CHUNK_BYTES."""
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        yield from torch.split(flat, CHUNK_BYTES) if flat.numel() else ()
