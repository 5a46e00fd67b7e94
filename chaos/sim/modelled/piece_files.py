"""The files of a real model's commits, as JSON: tensors whole or in spans, each with its path, and plain values.

Every writer writes the spans that the state's `Pieces` say are its own, and its turn of the whole tensors. A reader
puts tensors together from all files, and takes what it holds of them: who has written what shows in nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from elastic_train.checkpoint.format.layout import AttemptPlan, Leaves, Part, PlainSlot, Planner, Slot, State
from elastic_train.checkpoint.format.pieces import Pieces, Span
from elastic_train.checkpoint.format.state_tree import StatePath, survey
from elastic_train.checkpoint.format.torch_frame import bytes_of, frame_of
from elastic_train.checkpoint.format.weights_digest import tensor_digest

_Item = tuple[StatePath, torch.dtype, torch.Size]
"""What becomes a slot; the last part of a span's path is "lo:hi"."""


class PiecePart(Part):
    """A part of such a file."""


class PiecePlanner(Planner):
    """Plans such files; every kind of state once, whichever process asks."""

    def plan(self, state: State, leaves: Leaves, num_writers: int) -> AttemptPlan:
        made_for = tuple((path, _kind_of(leaf)) for path, leaf in leaves.items()), num_writers
        if made_for not in _plans:
            _plans[made_for] = _plan(*made_for, survey(state))
        return _plans[made_for]

    def encode(self, plan: AttemptPlan, leaves: Leaves) -> dict[str, bytes]:
        return {name: json.dumps(leaves[slot.path]).encode() for name, slot in plan.plain.items()}


_Written = tuple[tuple[Span, ...], ...]
_Kind = tuple[torch.dtype, torch.Size, _Written | None] | None


def _kind_of(leaf: object) -> _Kind:
    """Return what a plan has to know of a leaf; None for a plain value."""
    if isinstance(leaf, Pieces):
        return leaf.dtype, leaf.shape, tuple(tuple(spans) for spans in leaf.written)
    return (leaf.dtype, leaf.shape, None) if isinstance(leaf, Tensor) else None


_Kinds = tuple[tuple[StatePath, _Kind], ...]
_plans: dict[tuple[_Kinds, int], AttemptPlan] = {}


def _plan(
    kinds: _Kinds,
    num_writers: int,
    surveyed: tuple[tuple[StatePath, ...], tuple[StatePath, ...]],
) -> AttemptPlan:
    items: list[list[_Item]] = [[] for _ in range(num_writers)]
    plain: dict[str, PlainSlot] = {}
    for turn, (path, kind) in enumerate(kinds):
        if kind is None:
            name = json.dumps(path)
            plain[name] = PlainSlot(path, MetadataIndex(name))
            continue
        dtype, shape, written = kind
        if written is None:
            items[turn % num_writers].append((path, dtype, shape))
            continue
        assert len(written) == num_writers, f"{len(written)} writers of {path}, the save has {num_writers}"
        for place, spans in enumerate(written):
            items[place] += [((*path, f"{lo}:{hi}"), dtype, torch.Size((hi - lo,))) for lo, hi in spans]
    parts = [_lay_out(number, mine) for number, mine in enumerate(items)]
    return AttemptPlan(tuple(parts), plain, Metadata({}), *surveyed)


def _lay_out(number: int, items: Sequence[_Item]) -> PiecePart:
    slots, end = list[Slot](), 0
    for path, dtype, shape in items:
        frame = frame_of(dtype, shape)
        slots.append(Slot(path, dtype, shape, frame, end, MetadataIndex(json.dumps(path))))
        end += frame.num_bytes
    return PiecePart(f"__{number}_0.distcp", tuple(slots), end)


def with_spans(part: Part, leaves: Leaves) -> Leaves:
    """Return the live memory of a part's slots by their paths, those of spans included."""
    return {slot.path: _memory(slot.path, leaves) for slot in part.slots}


def _memory(path: StatePath, leaves: Leaves) -> object:
    if path in leaves:
        return leaves[path]
    pieces = leaves[path[:-1]]
    assert isinstance(pieces, Pieces), "the plan is of this state"
    return pieces.memory(_span_of(path))


def live_contents(part: Part, leaves: Leaves) -> Iterable[memoryview]:
    """Return the bytes of a part's tensors."""
    live = (leaf for leaf in with_spans(part, leaves).values() if isinstance(leaf, Tensor))
    return [bytes_of(tensor.detach().contiguous()) for tensor in live]


def encode_part(part: Part, contents: Iterable[memoryview], plain: Mapping[str, bytes]) -> tuple[bytes, dict[str, str]]:
    """Return a part's file, and the digests of the weights in it."""
    tensors, digests = list[object](), dict[str, str]()
    for slot, content in zip(part.slots, contents, strict=True):
        numbers = np.frombuffer(content, _numpy_of(slot.dtype)).tolist()
        tensors.append([slot.path, str(slot.dtype).removeprefix("torch."), slot.shape, numbers])
        if slot.path[0] == "model":
            digests[str(slot.path[-1])] = tensor_digest(slot.dtype, slot.shape, content)
    values = {name: json.loads(encoded) for name, encoded in plain.items()}
    return json.dumps({"tensors": tensors, "plain": values}).encode(), digests


def is_piece_file(content: bytes) -> bool:
    return content.startswith(b'{"tensors"')


@lru_cache(64)
def tensors_of(contents: tuple[bytes, ...]) -> dict[StatePath, Tensor]:
    """Return the tensors that the files of a commit hold, put together from their spans."""
    found: dict[StatePath, Tensor] = {}
    spans: dict[StatePath, list[tuple[Span, Tensor]]] = {}
    for content in contents:
        for place, kind, shape, numbers in json.loads(content)["tensors"]:
            path: StatePath = tuple(place)
            tensor = torch.tensor(numbers, dtype=getattr(torch, kind)).view(shape)
            if path[0] == "optimizer" and ":" in str(path[-1]):
                spans.setdefault(path[:-1], []).append((_span_of(path), tensor))
            else:
                found[path] = tensor
    for path, parts in spans.items():
        parts.sort(key=lambda part: part[0])
        ends = [0, *(hi for (_, hi), _ in parts)]
        assert [lo for (lo, _), _ in parts] == ends[:-1], f"the spans of {path} are not the whole of it, once"
        found[path] = torch.cat([tensor for _, tensor in parts])
    return found


def read_leaves(contents: tuple[bytes, ...], wanted: Mapping[StatePath, object]) -> dict[StatePath, object]:
    """Fill what is wanted, in place, from the files of a commit; return it with what else they hold."""
    leaves: dict[StatePath, object] = {}
    for content in contents:
        leaves |= {tuple(json.loads(name)): value for name, value in json.loads(content)["plain"].items()}
    for path, stored in tensors_of(contents).items():
        target = wanted.get(path)
        if isinstance(target, Pieces):
            for (lo, hi), held in target.held.items():
                held.copy_(stored.view(-1)[lo:hi])
        elif isinstance(target, Tensor):
            target.detach().copy_(stored.view(target.shape))
        leaves[path] = stored.clone() if target is None else target
    return leaves


def _span_of(path: StatePath) -> Span:
    lo, _, hi = str(path[-1]).partition(":")
    return int(lo), int(hi)


def _numpy_of(dtype: torch.dtype) -> str:
    return {torch.int64: "int64", torch.float32: "float32", torch.float64: "float64"}[dtype]
