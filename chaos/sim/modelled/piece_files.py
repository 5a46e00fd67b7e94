"""Files of a real model's commits as JSON: whole tensors or spans, with their paths, and plain values.

Every writer writes the spans that the state's `Pieces` assign to it, of moments and weights, and its share of the whole
tensors. A reader assembles tensors from all files and takes what it holds: the result does not depend on the writers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from elastic_train.checkpoint.format.dcp import GrainRun, GrainRunHash, tensor_digest
from elastic_train.checkpoint.format.layout import (
    AttemptPlan,
    Leaves,
    Part,
    PlainSlot,
    Planner,
    Slot,
    State,
    _cut_at,
    frame_of,
)
from elastic_train.checkpoint.format.state_tree import Pieces, Span, StatePath, moved, survey
from elastic_train.parallel.devices.squares import in_memory_order
from elastic_train.placement.grains import Cut, CutDims, bounds_of, cut_along, strides_of


class _Item(NamedTuple):
    """Content of a slot: a tensor, or a span of one with `shape` that of the whole."""

    path: StatePath
    dtype: torch.dtype
    shape: torch.Size
    span: Span | None
    cut: Cut | None


@dataclass(frozen=True, slots=True)
class PiecePart(Part):
    """A part of such a file."""


class PiecePlanner(Planner):
    """Planner of such files; cached by kind of state for all processes."""

    def plan(self, state: State, leaves: Leaves, num_writers: int, dims: CutDims | None = None) -> AttemptPlan:
        made_for = tuple((path, _kind_of(path, leaf, dims or {})) for path, leaf in leaves.items()), num_writers
        if made_for not in _plans:
            _plans[made_for] = _plan(*made_for, survey(state))
        return _plans[made_for]

    def encode(self, plan: AttemptPlan, leaves: Leaves) -> dict[str, bytes]:
        return {name: json.dumps(leaves[slot.path]).encode() for name, slot in plan.plain.items()}


_Written = tuple[tuple[Span, ...], ...]
_Kind = tuple[torch.dtype, torch.Size, _Written | None, Cut | None] | None


def _kind_of(path: StatePath, leaf: object, dims: CutDims) -> _Kind:
    """Return what a plan depends on in a leaf; None for a plain value."""
    if isinstance(leaf, Pieces):
        return leaf.dtype, leaf.shape, tuple(tuple(spans) for spans in leaf.written), leaf.cut
    if not isinstance(leaf, Tensor):
        return None
    return leaf.dtype, leaf.shape, None, _cut_at(path, leaf.shape, dims)


_Kinds = tuple[tuple[StatePath, _Kind], ...]
_plans: dict[tuple[_Kinds, int], AttemptPlan] = {}


def _plan(
    kinds: _Kinds,
    num_writers: int,
    surveyed: tuple[tuple[StatePath, ...], tuple[StatePath, ...]],
) -> AttemptPlan:
    items: list[list[_Item]] = [[] for _ in range(num_writers)]
    plain: dict[str, PlainSlot] = {}
    cut: dict[str, TensorStorageMetadata] = {}
    for turn, (path, kind) in enumerate(kinds):
        name = json.dumps(path)
        if kind is None:
            plain[name] = PlainSlot(path, MetadataIndex(name))
            continue
        dtype, shape, written, along = kind
        if written is None:
            items[turn % num_writers].append(_Item(path, dtype, shape, None, along))
            continue
        assert len(written) == num_writers, f"{len(written)} writers of {path}, the save has {num_writers}"
        cut[name] = TensorStorageMetadata(TensorProperties(dtype), shape, [])
        for place, spans in enumerate(written):
            items[place] += [_Item(path, dtype, shape, span, along) for span in spans]
    parts = [_lay_out(number, mine) for number, mine in enumerate(items)]
    return AttemptPlan(tuple(parts), plain, Metadata({**cut}), *surveyed)


def _lay_out(number: int, items: Sequence[_Item]) -> PiecePart:
    slots, end = list[Slot](), 0
    for path, dtype, whole, span, cut in items:
        shape = torch.Size(moved(whole, cut)) if span is None else torch.Size((span[1] - span[0],))
        frame = frame_of(dtype, shape)
        slots.append(Slot(path, dtype, shape, frame, end, MetadataIndex(json.dumps(path)), span, whole, cut))
        end += frame.num_bytes
    return PiecePart(f"__{number}_0.distcp", tuple(slots), end)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A part's file with digests of its weights: whole tensors by name, spans by grains."""

    content: bytes
    digests: Mapping[str, str]
    grains: Mapping[str, tuple[GrainRun, ...]] = field(default_factory=dict)


def encode_part(part: PiecePart, contents: Iterable[memoryview], plain: Mapping[str, bytes]) -> Encoded:
    tensors, digests, grains = list[object](), dict[str, str](), dict[str, tuple[GrainRun, ...]]()
    for slot, content in zip(part.slots, contents, strict=True):
        numbers = np.frombuffer(content, _numpy_of(slot.dtype)).tolist()
        kind, dim = str(slot.dtype).removeprefix("torch."), None if slot.cut is None else slot.cut.dim
        tensors.append([slot.path, kind, slot.whole, slot.span, dim, numbers])
        if slot.weight is not None and slot.span is None:
            digests[slot.weight] = tensor_digest(slot.dtype, slot.whole, content, slot.cut)
        elif slot.weight is not None and slot.span is not None:
            run = GrainRunHash(bounds_of(tuple(slot.whole), slot.cut), slot.span[0], slot.dtype.itemsize)
            run.update(content)
            grains[slot.weight] = (*grains.get(slot.weight, ()), run.digests())
    values = {name: json.loads(encoded) for name, encoded in plain.items()}
    return Encoded(json.dumps({"tensors": tensors, "plain": values}).encode(), digests, grains)


def is_piece_file(content: bytes) -> bool:
    return content.startswith(b'{"tensors"')


@lru_cache(64)
def tensors_of(contents: tuple[bytes, ...]) -> dict[StatePath, Tensor]:
    """Return the tensors of a commit, assembled from their spans."""
    found: dict[StatePath, Tensor] = {}
    spans: dict[StatePath, list[tuple[Span, Tensor]]] = {}
    kinds: dict[StatePath, tuple[list[int], int | None]] = {}
    for content in contents:
        for place, kind, shape, span, dim, numbers in json.loads(content)["tensors"]:
            path: StatePath = tuple(place)
            tensor, kinds[path] = torch.tensor(numbers, dtype=getattr(torch, kind)), (shape, dim)
            if span is None:
                found[path] = _shaped(tensor, shape, dim)
            else:
                spans.setdefault(path, []).append(((span[0], span[1]), tensor))
    for path, parts in spans.items():
        parts.sort(key=lambda part: part[0])
        ends = [0, *(hi for (_, hi), _ in parts)]
        assert [lo for (lo, _), _ in parts] == ends[:-1], f"the spans of {path} are not the whole of it, once"
        found[path] = _shaped(torch.cat([tensor for _, tensor in parts]), *kinds[path])
    return found


def _shaped(elements: Tensor, shape: Sequence[int], dim: int | None) -> Tensor:
    """Return a tensor from its elements in memory order."""
    return elements.as_strided(tuple(shape), strides_of(shape, cut_along(shape, dim)))


def read_leaves(contents: tuple[bytes, ...], wanted: Mapping[StatePath, object]) -> dict[StatePath, object]:
    """Fill what is wanted, in place, from the files of a commit; return it with what else they hold."""
    leaves: dict[StatePath, object] = {}
    for content in contents:
        leaves |= {tuple(json.loads(name)): value for name, value in json.loads(content)["plain"].items()}
    for path, stored in tensors_of(contents).items():
        target = wanted.get(path)
        if isinstance(target, Pieces):
            fill_pieces(target, stored)
        elif isinstance(target, Tensor):
            target.detach().copy_(stored.reshape(target.shape))
        leaves[path] = stored.clone() if target is None else target
    return leaves


def fill_pieces(pieces: Pieces, stored: Tensor) -> None:
    """Copy the held spans out of a whole tensor."""
    for (lo, hi), held in pieces.held.items():
        held.copy_(in_memory_order(stored.view(pieces.shape), pieces.cut)[lo:hi])


def _numpy_of(dtype: torch.dtype) -> str:
    return {torch.int64: "int64", torch.float32: "float32", torch.float64: "float64"}[dtype]
