"""Read checkpoint files: bytes go from the file directly to their destination, checked on the way.

Stored and wanted tensors may be cut differently. A whole tensor is assembled by torch's planner. Of a tensor in pieces
only the elements held by this rank are read, straight into its memory: stored boxes, held spans and their overlaps are
all runs of elements.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from elastic_train.checkpoint.format.dcp import METADATA
from elastic_train.checkpoint.format.layout import bytes_of, frame_of
from elastic_train.checkpoint.format.state_tree import Pieces, Span, StatePath, boxes, moved, moved_back, span_of
from elastic_train.checkpoint.stores.checksums import CheckedFile, open_checked
from elastic_train.checkpoint.stores.store import BLOCK_BYTES, FileRecord, Store, read
from elastic_train.errors import CommitError, ConfigError

_NUM_READERS = 2
_RUN_BYTES = 32 << 20


class Landing(NamedTuple):
    """Destinations of a stored item's bytes: views with file offsets, ascending, and a final step.

    `finish` may read further from the file it is given.
    """

    views: list[tuple[int, memoryview]]
    finish: Callable[[CheckedFile], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A range of a stored item in a file; `land` allocates temporary memory when needed."""

    file: str
    offset: int
    num_bytes: int
    land: Callable[[], Landing]


def read_leaves(
    store: Store, attempt: str, files: Mapping[str, FileRecord], wanted: Mapping[StatePath, object]
) -> dict[StatePath, object]:
    """Read every tensor and plain value by path; wanted tensors and held pieces are filled in place.

    Wanted leaves in pieces are returned as they are; unwanted ones are read whole. Raise ConfigError, before any
    change, if a wanted leaf is missing or of another kind; CommitError if bytes do not match their checksums.
    """
    metadata = read_metadata(store, attempt, files)
    paths: dict[str, StatePath] = {name: tuple(path) for name, path in metadata.planner_data.items()}
    problems = list(_mismatches(metadata, paths, wanted))
    if problems:
        raise ConfigError(*problems)
    found = {name: wanted.get(paths[name]) for name in metadata.state_dict_metadata}
    leaves = read_named(store, attempt, files, metadata, found)
    return {paths[name]: leaves[name] for name in metadata.state_dict_metadata}


def read_named(
    store: Store, attempt: str, files: Mapping[str, FileRecord], metadata: Metadata, wanted: Mapping[str, object]
) -> dict[str, object]:
    """Read some stored items by name into the destinations in `wanted`; None means a new one."""
    pieces = {name: leaf for name, leaf in wanted.items() if isinstance(leaf, Pieces)}
    again = _tied_to_others(wanted)
    leaves = {
        name: _destination(metadata.state_dict_metadata[name], leaf)
        for name, leaf in wanted.items()
        if name not in pieces and name not in again
    }
    planner = _PlainLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(leaves, metadata, is_coordinator=True)
    items = [*_wanted_wholes(metadata, planner), *_wanted_pieces(metadata, pieces)]
    try:
        _read_items(store, attempt, files, items)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise CommitError(f"{store.url}/{attempt}: cannot be read: {error}") from error
    return {name: pieces.get(name, again.get(name, planner.state_dict.get(name))) for name in wanted}


def _tied_to_others(wanted: Mapping[str, object]) -> dict[str, Tensor]:
    """Return all but the first of tied tensors: memory that is read twice may be rearranged twice."""
    known, others = set[tuple[int, torch.Size, tuple[int, ...]]](), dict[str, Tensor]()
    for name, leaf in wanted.items():
        if isinstance(leaf, Tensor) and leaf.nbytes:
            place = leaf.data_ptr(), leaf.shape, leaf.stride()
            if place in known:
                others[name] = leaf.detach()
            known.add(place)
    return others


class _PlainLoadPlanner(DefaultLoadPlanner):
    """Reads plain values without executing pickles."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read_metadata(store: Store, attempt: str, files: Mapping[str, FileRecord]) -> Metadata:
    """Unpickle the metadata after checking its digest."""
    key = f"{attempt}/{METADATA}"
    content = read(store, key)
    if blake3(content).hexdigest() != _record_of(store, key, files).blake3:
        raise CommitError(f"{store.url}/{key} does not match its digest")
    metadata = pickle.loads(content)
    assert isinstance(metadata, Metadata), "what we have written"
    return metadata


def _record_of(store: Store, key: str, files: Mapping[str, FileRecord]) -> FileRecord:
    record = files.get(key.rsplit("/", 1)[1])
    if record is None:
        raise CommitError(f"{store.url}/{key} is not in the commit's record")
    return record


def _read_items(store: Store, attempt: str, files: Mapping[str, FileRecord], items: Sequence[Wanted]) -> None:
    """Read items with a few readers, each file front to back."""

    def read_run(run: Sequence[Wanted]) -> None:
        key = f"{attempt}/{run[0].file}"
        with open_checked(store, key, _record_of(store, key, files)) as file:
            landings = [item.land() for item in run]
            _fill(file, [view for landing in landings for view in landing.views])
            for landing in landings:  # nothing is used before everything is checked
                landing.finish(file)

    with ThreadPoolExecutor(_NUM_READERS, "reading") as readers:
        for _ in readers.map(read_run, _runs(items)):
            pass


def _runs(items: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Group items, ordered by location, into runs of some megabytes of a file."""
    run: list[Wanted] = []
    num_bytes = 0
    for item in sorted(items, key=lambda item: (item.file, item.offset)):
        if run and (num_bytes >= _RUN_BYTES or item.file != run[0].file):
            yield run
            run, num_bytes = [], 0
        run.append(item)
        num_bytes += item.num_bytes
    if run:
        yield run


def _fill(file: CheckedFile, views: Sequence[tuple[int, memoryview]]) -> None:
    """Fill views with the bytes at their offsets; a block shared by several is read once."""
    spare = memoryview(bytearray())
    stretch: list[memoryview] = []
    start = end = 0
    for offset, view in views:
        if stretch and offset > end + -end % BLOCK_BYTES:
            file.fill(start, stretch)
            stretch = []
        if not stretch:
            start = end = offset
        if offset > end:
            spare = spare or memoryview(bytearray(BLOCK_BYTES))
            stretch.append(spare[: offset - end])
        stretch.append(view)
        end = offset + len(view)
    if stretch:
        file.fill(start, stretch)


def _wanted_wholes(metadata: Metadata, planner: DefaultLoadPlanner) -> Iterator[Wanted]:
    """Yield the items requested by the planner: plain values and whole tensors."""
    for item in planner.finish_plan(planner.create_local_plan()).items:
        info = metadata.storage_data[item.storage_index]
        yield Wanted(info.relative_path, info.offset, info.length, partial(_land_whole, info, item, planner))


def _land_whole(info: _StorageInfo, item: ReadItem, planner: DefaultLoadPlanner) -> Landing:
    """Read an item whole: directly into a tensor if that is complete, in memory order, and on the CPU."""
    if item.type == LoadItemType.BYTE_IO:
        return _land_all(info, lambda content: planner.load_bytes(item, io.BytesIO(content)))
    target = planner.resolve_tensor(item).detach()
    first = next((dim for dim in range(target.ndim) if target.movedim(dim, 0).is_contiguous()), None)
    frame = frame_of(target.dtype, item.lengths, first or 0)
    if frame.num_bytes != info.length:
        return _land_all(info, lambda content: _unpickle(content, item, target))
    is_direct = target.is_cpu and (first is not None or target.is_contiguous())
    in_order = target.movedim(first, 0) if first else target
    landing = in_order if is_direct else torch.empty(in_order.shape, dtype=target.dtype)
    head, tail = memoryview(bytearray(frame.head)), memoryview(bytearray(frame.tail))
    content = bytes_of(landing)

    def finish(_: CheckedFile) -> None:
        if head != frame.head:
            _unpickle(b"".join([head, content, tail]), item, target)
        elif not is_direct:
            in_order.copy_(landing)

    body = info.offset + len(head)
    return Landing([(info.offset, head), (body, content), (body + len(content), tail)], finish)


def _land_all(info: _StorageInfo, use: Callable[[bytes], None]) -> Landing:
    """Read an item's bytes into temporary memory."""
    content = memoryview(bytearray(info.length))
    return Landing([(info.offset, content)], lambda _: use(bytes(content)))


def _unpickle(content: bytes, item: ReadItem, target: Tensor) -> None:
    """Fill a tensor through torch, from the bytes of a larger or differently framed one."""
    stored = torch.load(io.BytesIO(content), weights_only=True)
    for axis, (lo, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        stored = stored.narrow(axis, lo, length)
    target.copy_(stored)


class _Box(NamedTuple):
    """A stored box, dimensions in memory order, its location, and its run of elements (None if it is not one run)."""

    info: _StorageInfo
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: Span | None


def _wanted_pieces(metadata: Metadata, pieces: Mapping[str, Pieces]) -> Iterator[Wanted]:
    """Yield what the held spans of tensors in pieces need from every stored box."""
    for name, leaf in pieces.items():
        stored = metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata), "it is of the wanted kind"
        for number, chunk in enumerate(stored.chunks):
            info = metadata.storage_data[MetadataIndex(name, chunk.offsets, number)]
            offsets, sizes = moved(chunk.offsets, leaf.cut), moved(chunk.sizes, leaf.cut)
            box = _Box(info, offsets, sizes, span_of(moved(leaf.shape, leaf.cut), offsets, sizes))
            if num_bytes := sum(target.nbytes for target, _ in _common(leaf, box)):
                yield Wanted(info.relative_path, info.offset, num_bytes, partial(_land_pieces, leaf, box))


def _common(leaf: Pieces, stored: _Box) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """Yield the overlaps of held spans with a stored box: memory shaped as a box, and its position in it."""
    shape = moved(leaf.shape, leaf.cut)
    for span in leaf.held:
        for box in boxes(shape, span):
            lo = [max(ends) for ends in zip(box.offsets, stored.offsets, strict=True)]
            both = zip(box.offsets, box.sizes, stored.offsets, stored.sizes, strict=True)
            hi = [min(mine + size, other + length) for mine, size, other, length in both]
            if all(first < last for first, last in zip(lo, hi, strict=True)):
                mine = tuple(slice(a - at, b - at) for a, b, at in zip(lo, hi, box.offsets, strict=True))
                theirs = tuple(slice(a - at, b - at) for a, b, at in zip(lo, hi, stored.offsets, strict=True))
                yield leaf.memory(box.span).detach().view(box.sizes)[mine], theirs


def _land_pieces(leaf: Pieces, box: _Box) -> Landing:
    """Read spans of a stored box into their memory, through temporary memory if that is on a device.

    The box's head is read as well, to verify the location of its elements: if it differs, or the box is not a single
    run of elements, all of it is read.
    """
    dim = 0 if leaf.cut is None else leaf.cut.dim

    def use(content: bytes) -> None:
        stored = torch.load(io.BytesIO(content), weights_only=True)
        stored = stored.movedim(dim, 0) if dim else stored
        for target, place in _common(leaf, box):
            target.copy_(stored[place])

    frame = frame_of(leaf.dtype, torch.Size(moved_back(box.sizes, leaf.cut)), dim)
    if box.span is None or frame.num_bytes != box.info.length:
        return _land_all(box.info, use)
    needed, start = list(leaf.overlapping(box.span)), box.span[0]
    targets = [leaf.memory(span).detach() for span in needed]
    head = memoryview(bytearray(frame.head))
    landings = [target if target.is_cpu else torch.empty_like(target, device="cpu") for target in targets]

    def finish(file: CheckedFile) -> None:
        if head != frame.head:
            content = memoryview(bytearray(box.info.length))
            file.fill(box.info.offset, [content])
            use(bytes(content))
            return
        for target, landing in zip(targets, landings, strict=True):
            if landing is not target:
                target.copy_(landing)

    body = box.info.offset + len(head)
    views = [
        (body + (lo - start) * leaf.dtype.itemsize, bytes_of(landing))
        for (lo, _), landing in zip(needed, landings, strict=True)
    ]
    return Landing([(box.info.offset, head), *views], finish)


def _mismatches(
    metadata: Metadata, paths: Mapping[str, StatePath], wanted: Mapping[StatePath, object]
) -> Iterator[str]:
    """Describe each wanted leaf that the files lack or have as another kind: copying would convert it."""
    names = {path: name for name, path in paths.items()}
    for path, leaf in wanted.items():
        shown = ".".join(str(part) for part in path)
        stored = metadata.state_dict_metadata.get(names.get(path, ""))
        here, there = _kind_of(leaf), "nothing" if stored is None else _kind_of(stored)
        if here != there:
            yield f"state '{shown}' is {here}, the commit holds {there}; was the model or the optimizer changed?"


def _kind_of(leaf: object) -> str:
    if isinstance(leaf, Tensor | Pieces):
        return f"{tuple(leaf.shape)} {leaf.dtype}"
    if isinstance(leaf, TensorStorageMetadata):
        return f"{tuple(leaf.size)} {leaf.properties.dtype}"
    return "a plain value"


def _destination(stored: object, target: object) -> Tensor | None:
    """Return the tensor to read into, the wanted one if given; None for a plain value."""
    if not isinstance(stored, TensorStorageMetadata):
        return None
    return target.detach() if isinstance(target, Tensor) else torch.empty(stored.size, dtype=stored.properties.dtype)
