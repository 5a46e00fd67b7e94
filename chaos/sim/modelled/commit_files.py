"""Files of a modelled commit: staged by the product, planned once per shape, written as JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import BinaryIO

import numpy as np
import torch

from chaos.judge.evidence.stored_weights import Tensors, checked_files
from chaos.sim.modelled import piece_files
from elastic_train.checkpoint.format import layout
from elastic_train.checkpoint.format.dcp import WrittenPart, tensor_digest
from elastic_train.checkpoint.format.layout import (
    AttemptPlan,
    Leaves,
    Part,
    State,
)
from elastic_train.checkpoint.format.state_tree import Pieces, StatePath
from elastic_train.checkpoint.saving.staging import Buffer, Snapshot
from elastic_train.checkpoint.stores.checksums import HashingSink, open_checked
from elastic_train.checkpoint.stores.store import FileRecord, Store, no_listener
from elastic_train.placement.grains import CutDims


class SlowSnapshot(Snapshot):
    """A snapshot whose copy takes time, so that training has to wait for it."""

    def __init__(self, sleep: Callable[[], None], part: Part, leaves: Leaves, is_still: Callable[[StatePath], bool]):
        super().__init__(part, leaves, is_still)
        self._sleep = sleep

    def copy(self, buffer: Buffer, check: Callable[[], None], advance: Callable[[int], None]) -> None:
        self._sleep()
        super().copy(buffer, check, advance)


_plans: dict[tuple[object, ...], AttemptPlan] = {}
_plan_attempt = layout.plan_attempt


def plan_attempt(state: State, num_writers: int = 1, dims: CutDims | None = None) -> AttemptPlan:
    """Plan as the product does, but cached by shape: torch's planner is slow."""
    model = state["model"]
    assert isinstance(model, dict), "as `ModelledState.tensors` makes it"
    sizes, cut = (model["counts"].numel(), model["digest"].numel()), tuple(sorted((dims or {}).items()))
    shape = *sizes, num_writers, layout.LEAST_PART_BYTES, cut
    if shape not in _plans:
        _plans[shape] = _plan_attempt(state, num_writers, dims or {})
    return _plans[shape]


def write_part(
    store: Store,
    attempt: str,
    part: Part,
    contents: Iterable[memoryview],
    plain: Mapping[str, bytes],
    *,
    on_progress: Callable[[], None] = no_listener,
    **_: object,
) -> WrittenPart:
    """Write one part's file as JSON, with the product's checksums."""
    with store.write(f"{attempt}/{part.name}") as file, HashingSink(file, on_progress) as sink:
        on_progress()
        encoded = _encode(part, contents, plain)
        sink.write(encoded.content)
        sink.close()
    on_progress()
    return WrittenPart(part.name, sink.record(), {}, encoded.digests, encoded.grains)


def _encode(part: Part, contents: Iterable[memoryview], plain: Mapping[str, bytes]) -> piece_files.Encoded:
    if isinstance(part, piece_files.PiecePart):
        return piece_files.encode_part(part, contents, plain)
    assert not plain, "the modelled state holds tensors"
    held = [(str(slot.path[-1]), slot, content) for slot, content in zip(part.slots, contents, strict=True)]
    numbers = {name: np.frombuffer(content, np.int64).tolist() for name, _, content in held}
    digests = {name: tensor_digest(slot.dtype, slot.whole, content, slot.cut) for name, slot, content in held}
    return piece_files.Encoded(json.dumps(numbers).encode(), digests)


def finish_attempt(
    store: Store, attempt: str, plan: AttemptPlan, written: Sequence[WrittenPart]
) -> dict[str, FileRecord]:
    return {part.name: part.file for part in written}


def read_leaves(
    store: Store, attempt: str, files: Mapping[str, FileRecord], wanted: Mapping[StatePath, object]
) -> dict[StatePath, object]:
    contents = list[bytes]()
    for name, record in files.items():
        memory = bytearray(record.size)
        with open_checked(store, f"{attempt}/{name}", record) as file:
            file.fill(0, [memoryview(memory)])
        contents.append(bytes(memory))
    if all(map(piece_files.is_piece_file, contents)):
        return piece_files.read_leaves(tuple(contents), wanted)
    leaves: dict[StatePath, object] = {}
    for content in contents:
        for name, stored in _tensors_of(content).items():
            target = wanted.get(("model", name))
            if isinstance(target, Pieces):
                piece_files.fill_pieces(target, stored)
            leaves["model", name] = target if isinstance(target, Pieces) else stored.clone()
    return leaves


def load_weights(files: Mapping[str, tuple[bytes, float]], record: Mapping[str, object]) -> Tensors:
    """Return the weights that a commit record's files hold, checked by the judge's rules."""

    def open_file(name: str) -> BinaryIO | None:
        held = files.get(f"{record['attempt']}/{name}")
        return None if held is None else io.BytesIO(held[0])

    contents = [file.read() for _, file in checked_files(record, open_file)]
    if all(map(piece_files.is_piece_file, contents)):
        tensors = piece_files.tensors_of(tuple(contents))
        return {str(path[-1]): tensor for path, tensor in tensors.items() if path[0] == "model"}
    return {name: tensor for content in contents for name, tensor in _tensors_of(content).items()}


@lru_cache(64)
def _tensors_of(content: bytes) -> dict[str, torch.Tensor]:
    """Read a file's tensors; cached, since all ranks of a world read the same ones."""
    return {name: torch.tensor(numbers) for name, numbers in json.loads(content).items()}
