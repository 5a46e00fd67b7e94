"""The layout of a state in files: what each rank writes, and where; equal on every rank that plans it.

A plan reads no tensor values. It is valid while the state keeps its shape, so it is made once; a save only re-encodes
plain values that changed.

A *frame* is the bytes before and after a tensor's own, as in a `torch.save` of that tensor alone.

They depend on type and shape only, so a file's layout is known before any tensor, and a tensor's bytes move between
memory and file without a pickle. torch writes the frame with the tensor skipped. Readers must not rely on the zip
archive's CRC of the tensor: it stays zero, and torch ignores it.
"""

from __future__ import annotations

import functools
import heapq
import io
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from elastic_train.checkpoint.format.state_tree import (
    Box,
    Pieces,
    Span,
    StatePath,
    boxes,
    hollowed,
    leaves_of,
    moved,
    moved_back,
    survey,
)
from elastic_train.errors import ConfigError
from elastic_train.placement.grains import Cut, CutDims, bounds_of, cut_along


@dataclass(frozen=True, slots=True)
class Frame:
    """The bytes before and after a tensor's `size` bytes."""

    head: bytes
    size: int
    tail: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.head) + self.size + len(self.tail)


@functools.lru_cache(maxsize=65536)
def frame_of(dtype: torch.dtype, shape: torch.Size, first: int = 0) -> Frame:
    """Return the frame of a tensor without allocating its size.

    The tensor is stored contiguously with dimension `first` moved to the front.
    """
    hollow = _Hollow()
    stored = torch.empty([*shape[first : first + 1], *shape[:first], *shape[first + 1 :]], dtype=dtype)
    with torch.serialization.skip_data():
        torch.save(stored.movedim(0, first) if first else stored, hollow)  # type: ignore[arg-type]  # torch asks for no more
    size = dtype.itemsize * shape.numel()
    assert hollow.size == size, f"torch left out {hollow.size} bytes of {size}"
    return Frame(bytes(hollow.head), size, bytes(hollow.tail))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    assert tensor.is_contiguous(), "its bytes are elsewhere"
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # a single element is contiguous whatever its strides
    return flat.view(torch.uint8).numpy().data


class _Hollow(io.RawIOBase):
    """Collects what is written before and after the skipped range."""

    def __init__(self) -> None:
        self.head, self.tail = bytearray(), bytearray()
        self.size = 0
        self._is_behind = False

    def writable(self) -> bool:
        return True

    def write(self, content: object, /) -> int:
        view = memoryview(content)  # type: ignore[arg-type]  # any buffer
        (self.tail if self._is_behind else self.head).extend(view)
        return view.nbytes

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence == os.SEEK_CUR and not self._is_behind, "torch skips a tensor's bytes once"
        self._is_behind, self.size = True, offset
        return len(self.head) + offset


State = dict[str, object]
Leaves = dict[StatePath, object]
MODEL = "model"
AVERAGE = "ema"
"""Key of a parameter's averaged weights in the optimizer state."""
NO_CUTS: CutDims = {}
LEAST_PART_BYTES = 4 << 20
"""Least bytes of a part: each part costs requests, and one more rank that must not fail."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The location of a tensor, or of a box of one in pieces: path in the state, frame at `offset` in its file.

    `span` is the run of elements that the box covers, with `shape` in memory order; None for a whole tensor. Bytes are
    in the memory order defined by `cut`. `whole` is the whole tensor's shape.
    """

    path: StatePath
    dtype: torch.dtype
    shape: torch.Size
    frame: Frame
    offset: int
    index: MetadataIndex
    span: Span | None
    whole: torch.Size
    cut: Cut | None

    @property
    def weight(self) -> str | None:
        """Name of the weight or buffer; None for other state."""
        return weight_of(self.path) if self.path[0] == MODEL else None

    def memory(self, leaves: Leaves) -> Tensor:
        """Return the live memory of the leaf that is written here, in this shape."""
        leaf = leaves[self.path]
        if isinstance(leaf, Pieces):
            empty = torch.empty(0, dtype=self.dtype)
            return (empty if self.span is None else leaf.memory(self.span)).view(self.shape)
        assert isinstance(leaf, Tensor) and self.span is None, "the plan is of this state"
        return leaf if self.cut is None else leaf.movedim(self.cut.dim, 0)


@dataclass(frozen=True, slots=True)
class Part:
    """One writer's file; `num_bytes` counts its framed tensors, which plain values follow."""

    name: str
    slots: tuple[Slot, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PlainSlot:
    """Location of a plain value in the state."""

    path: StatePath
    index: MetadataIndex


@dataclass(frozen=True, slots=True)
class AttemptPlan:
    """Assignment of a state's parts to their writers; `int_keyed` and `empty` as in the commit record."""

    parts: tuple[Part, ...]
    plain: Mapping[str, PlainSlot]
    metadata: Metadata
    int_keyed: tuple[StatePath, ...]
    empty: tuple[StatePath, ...]


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor, or a box of one in pieces, without a location yet; `order` is its leaf's index in the state."""

    order: int
    path: StatePath
    dtype: torch.dtype
    shape: torch.Size
    index: MetadataIndex
    span: Span | None
    whole: torch.Size
    cut: Cut | None

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def plan_attempt(state: State, num_writers: int = 1, dims: CutDims = NO_CUTS) -> AttemptPlan:
    """Plan the files of a state for at most `num_writers`; `dims` names weights that may be split, with the dimension.

    Spans of tensors in pieces are written by their assigned writers; whole tensors are distributed so that loads are
    balanced. Raise ConfigError for a state that cannot be saved.
    """
    leaves = leaves_by_path(state)
    planner = DefaultSavePlanner()
    try:
        planner.set_up_planner(_plannable(state, leaves), is_coordinator=True)
    except ValueError as error:  # two paths with the same name, such as a -> b.c and a.b -> c
        raise ConfigError(f"the state cannot be saved: {error}; rename one of them") from error
    local = planner.create_local_plan()
    _, metadata = planner.create_global_plan([local])
    paths: dict[str, StatePath] = {name: tuple(path) for name, path in metadata.planner_data.items()}
    whole: list[_Item] = []
    fixed: list[list[_Item]] = [[] for _ in range(num_writers)]
    plain: dict[str, PlainSlot] = {}
    for order, item in enumerate(local.items):
        path, value = paths[item.index.fqn], planner.state_dict[item.index.fqn]
        if isinstance(leaf := leaves[path], Pieces) and leaf.shape.numel():
            metadata.state_dict_metadata[item.index.fqn] = _cut(fixed, order, path, leaf, item.index.fqn, metadata)
        elif isinstance(value, Tensor):
            shape = _strided(value, item.index).shape
            cut = _cut_at(path, shape, dims)
            in_order = torch.Size(moved(shape, cut))
            whole.append(_Item(order, path, value.dtype, in_order, item.index, None, shape, cut))
        else:
            plain[item.index.fqn] = PlainSlot(path, item.index)
    shares = _spread([item.num_bytes for item in whole], [sum(item.num_bytes for item in part) for part in fixed])
    parts = [
        _lay_out(number, sorted([*(whole[place] for place in share), *fixed[number]], key=lambda item: item.order))
        for number, share in enumerate(shares)
    ]
    return AttemptPlan(tuple(parts), plain, metadata, *survey(state))


def _plannable(state: State, leaves: Leaves) -> State:
    is_cut = any(isinstance(leaf, Pieces) for leaf in leaves.values())
    return cast(State, hollowed(state)) if is_cut else state


def _strided(tensor: Tensor, index: MetadataIndex) -> Tensor:
    if tensor.layout != torch.strided:
        raise ConfigError(f"state '{index.fqn}' is a {tensor.layout} tensor; a checkpoint holds strided ones only")
    return tensor


def _cut(
    fixed: list[list[_Item]], order: int, path: StatePath, leaf: Pieces, name: str, metadata: Metadata
) -> TensorStorageMetadata:
    """Assign a tensor's boxes to their writers; return its metadata, with the boxes as chunks."""
    assert len(leaf.written) <= len(fixed), f"'{name}' has {len(leaf.written)} writers, the save {len(fixed)}"
    found = sorted(_written_boxes(name, leaf, is_weight=path[0] == MODEL), key=lambda placed: placed[1].span)
    chunks: list[ChunkStorageMetadata] = []
    for place, (offsets, sizes, span) in found:
        where, shape = torch.Size(moved_back(offsets, leaf.cut)), torch.Size(moved_back(sizes, leaf.cut))
        chunk = ChunkStorageMetadata(where, shape)
        index = MetadataIndex(name, chunk.offsets, len(chunks))
        fixed[place].append(_Item(order, path, leaf.dtype, torch.Size(sizes), index, span, leaf.shape, leaf.cut))
        chunks.append(chunk)
    stored = metadata.state_dict_metadata[name]
    assert isinstance(stored, TensorStorageMetadata), "a hollow tensor stands for the pieces"
    return replace(stored, chunks=chunks)


def _written_boxes(name: str, leaf: Pieces, *, is_weight: bool) -> Iterator[tuple[int, Box]]:
    """Yield (writer, box), after checking that the spans cover the whole tensor."""
    spans = sorted((span, place) for place, spans in enumerate(leaf.written) for span in spans if span[0] < span[1])
    ends = [0, *(hi for (_, hi), _ in spans)]
    size = leaf.shape.numel()
    assert [lo for (lo, _), _ in spans] == ends[:-1] and ends[-1] == size, f"writers do not cover '{name}' once"
    assert not is_weight or set(ends) <= set(bounds_of(tuple(leaf.shape), leaf.cut)), f"'{name}' is not cut at grains"
    for span, place in spans:
        for box in boxes(moved(leaf.shape, leaf.cut), span):
            yield place, box


class Planner:
    """Plans states; a state like the last one costs almost nothing."""

    def __init__(self) -> None:
        self._made_for: object = None
        self._plan: AttemptPlan | None = None
        self._encoded: dict[str, tuple[bytes, bytes]] = {}

    def plan(self, state: State, leaves: Leaves, num_writers: int, dims: CutDims | None = None) -> AttemptPlan:
        """Plan a state with the given leaves; raise ConfigError for one that could not be read back."""
        dims = dims or NO_CUTS
        made_for = ([_kind_of(path, leaf) for path, leaf in leaves.items()], survey(state), num_writers, dims)
        if self._plan is None or made_for != self._made_for:
            self._plan, self._made_for = plan_attempt(state, num_writers, dims), made_for
        return self._plan

    def encode(self, plan: AttemptPlan, leaves: Leaves) -> dict[str, bytes]:
        return {name: self._encode(name, leaves[slot.path]) for name, slot in plan.plain.items()}

    def _encode(self, name: str, value: object) -> bytes:
        try:
            pickled = pickle.dumps(value)
            if self._encoded.get(name, (b"",))[0] != pickled:
                encoded = io.BytesIO()
                torch.save(value, encoded)
                encoded.seek(0)
                torch.load(encoded, weights_only=True)
                self._encoded[name] = (pickled, encoded.getvalue())
        except (pickle.PickleError, AttributeError, TypeError) as error:
            kind = type(value).__qualname__
            raise ConfigError(
                f"state '{name}' is a {kind}; a checkpoint holds tensors and plain values only"
            ) from error
        return self._encoded[name][1]


def _kind_of(path: StatePath, leaf: object) -> object:
    """Return everything about a leaf that a plan depends on."""
    if isinstance(leaf, Tensor):
        return path, leaf.dtype, leaf.shape
    if isinstance(leaf, Pieces):
        return path, leaf.dtype, leaf.shape, leaf.cut, tuple(map(tuple, leaf.written))
    return path


def _spread(sizes: Sequence[int], fixed: Sequence[int]) -> list[list[int]]:
    """Distribute whole tensors, largest first, to the share with the fewest bytes; each share is in state order.

    `fixed` are the bytes that each writer writes anyway: every writer with any has a share.
    """
    num_parts = max(1, min(len(fixed), (sum(sizes) + sum(fixed)) // LEAST_PART_BYTES))
    num_parts = max([num_parts, *(place + 1 for place, num_bytes in enumerate(fixed) if num_bytes)])
    loads = [(fixed[part], part) for part in range(num_parts)]
    heapq.heapify(loads)
    shares: list[list[int]] = [[] for _ in range(num_parts)]
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        load, part = heapq.heappop(loads)
        shares[part].append(place)
        heapq.heappush(loads, (load + sizes[place], part))
    return [sorted(share) for share in shares]


def _lay_out(number: int, items: Sequence[_Item]) -> Part:
    slots: list[Slot] = []
    end = 0
    for item in items:
        shape = torch.Size(moved_back(item.shape, item.cut))
        frame = frame_of(item.dtype, shape, 0 if item.cut is None else item.cut.dim)
        slot = Slot(item.path, item.dtype, item.shape, frame, end, item.index, item.span, item.whole, item.cut)
        slots.append(slot)
        end += frame.num_bytes
    return Part(f"__{number}_0.distcp", tuple(slots), end)


def _cut_at(path: StatePath, shape: torch.Size, dims: CutDims) -> Cut | None:
    """Return how a weight, or optimizer state of its shape, may be split; None if it may not."""
    dim = dims.get(weight_of(path) or "")
    return cut_along(shape, dim) if dim is not None and dim < len(shape) and shape.numel() else None


def weight_of(path: StatePath) -> str | None:
    """Return the name of the weight or buffer that a path belongs to, also as its moments; None for other values."""
    at = {MODEL: 1, "optimizer": 2}.get(str(path[0]))
    return str(path[at]) if at is not None and at < len(path) else None


def leaves_by_path(state: State) -> Leaves:
    return dict(leaves_of(state))
