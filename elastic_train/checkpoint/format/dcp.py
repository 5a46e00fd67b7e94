"""The files of a checkpoint: the format of torch.distributed.checkpoint, written to and read from a store.

torch's planners say what is in a state, and what of the files goes where; its metadata names every place. The bytes go
between memory and store by themselves (see `frames`), with every checksum computed or checked on the way. Nothing here
talks to another rank: with replicated state every rank computes the same plan and writes its part. Objects other than
tensors are plain values, all in part 0: they are written only if they can be read back without trusting a pickle.

Not used of torch's: its writer (it swallows the errors of threads, syncs before the flush, renames where a store
cannot), its load of pickled objects, and the wrappers that raise outside of `Exception`.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from elastic_train.checkpoint.format.layout import AttemptPlan, Part
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.checkpoint.format.torch_frame import bytes_of, frame_of
from elastic_train.checkpoint.format.weights_digest import tensor_digest
from elastic_train.checkpoint.stores.checked_file import CheckedFile, open_checked
from elastic_train.checkpoint.stores.checksums import FileRecord
from elastic_train.checkpoint.stores.hashing_sink import HashingSink, HashingThread
from elastic_train.checkpoint.stores.store import Store, no_listener, read
from elastic_train.errors import CommitError, ConfigError
from rendezvous.waiting import Call

Wanted = tuple[_StorageInfo, ReadItem]
Landing = tuple[list[memoryview], Callable[[list[memoryview]], None]]
_NUM_READERS = 2
_RUN_BYTES = 32 << 20
_MOST_BEHIND = 64
"""Staged tensors of the model whose SHA-256, which is slower than the disk, may be computed after they are written."""
METADATA = ".metadata"
MODEL = "model"


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenPart:
    """A part that is in the store: its file, where its plain values are (offset, length), the weights' digests."""

    name: str
    file: FileRecord
    plain: Mapping[str, tuple[int, int]]
    digests: Mapping[str, str]


def write_part(
    store: Store,
    attempt: str,
    part: Part,
    contents: Iterable[memoryview],
    plain: Mapping[str, bytes],
    *,
    most_behind: int = _MOST_BEHIND,
    on_progress: Callable[[], None] = no_listener,
) -> WrittenPart:
    """Write one part's file: its tensors' bytes, in the order of its slots, then encoded plain values.

    About `most_behind` tensors are held beside the one that is written. `on_progress` is called when the file is open,
    for every piece, and when the file is durable.
    """
    digests: dict[str, Call[str]] = {}
    places: dict[str, tuple[int, int]] = {}
    with (
        store.write(f"{attempt}/{part.name}") as file,
        HashingSink(file, on_progress) as sink,
        HashingThread(most_behind) as digesting,
    ):
        on_progress()
        for slot, content in zip(part.slots, contents, strict=True):
            if slot.path[0] == MODEL:
                name = ".".join(map(str, slot.path[1:]))
                digests[name] = digesting.do(partial(tensor_digest, slot.dtype, slot.shape, content))
            sink.write(slot.frame.head)
            sink.write(content)
            sink.write(slot.frame.tail)
        end = part.num_bytes
        for name, encoded in plain.items():
            sink.write(encoded)
            places[name] = (end, len(encoded))
            end += len(encoded)
        sink.close()
    on_progress()
    return WrittenPart(part.name, sink.record(), places, {name: digest.result() for name, digest in digests.items()})


def live_contents(part: Part, leaves: Mapping[StatePath, object]) -> Iterator[memoryview]:
    """Yield the bytes of a part's tensors without a copy, or copied one at a time from a device."""
    for slot in part.slots:
        tensor = leaves[slot.path]
        assert isinstance(tensor, Tensor), "the plan is of this state"
        yield bytes_of(tensor.detach().cpu().contiguous())


def finish_attempt(
    store: Store, attempt: str, plan: AttemptPlan, written: Sequence[WrittenPart]
) -> dict[str, FileRecord]:
    """Write the metadata that joins all parts; return the records of all files."""
    infos = {
        slot.index: _StorageInfo(part.name, slot.offset, slot.frame.num_bytes)
        for part in plan.parts
        for slot in part.slots
    }
    for part in written:
        infos |= {plan.plain[name].index: _StorageInfo(part.name, *place) for name, place in part.plain.items()}
    metadata = dataclasses.replace(
        plan.metadata, storage_data=infos, storage_meta=StorageMeta(attempt), version=CURRENT_DCP_VERSION
    )
    with store.write(f"{attempt}/{METADATA}") as file, HashingSink(file) as sink:
        sink.write(pickle.dumps(metadata))
        sink.close()
    return {**{part.name: part.file for part in written}, METADATA: sink.record()}


def read_leaves(
    store: Store, attempt: str, files: Mapping[str, FileRecord], wanted: Mapping[StatePath, object]
) -> dict[StatePath, object]:
    """Read every tensor and plain value by its path; tensors among `wanted` are filled in place.

    Raises ConfigError, before anything is changed, if a wanted leaf is not in the files or is of another kind there.
    """
    metadata = _read_metadata(store, attempt, files)
    paths: dict[str, StatePath] = {name: tuple(path) for name, path in metadata.planner_data.items()}
    problems = list(_mismatches(metadata, paths, wanted))
    if problems:
        raise ConfigError(*problems)
    leaves = {
        name: _destination(stored, wanted.get(paths[name])) for name, stored in metadata.state_dict_metadata.items()
    }
    planner = _PlainLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(leaves, metadata, is_coordinator=True)
    try:
        _read_items(store, attempt, files, metadata, planner)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise CommitError(f"{store.url}/{attempt}: cannot be read: {error}") from error
    return {paths[name]: value for name, value in planner.state_dict.items()}


class _PlainLoadPlanner(DefaultLoadPlanner):
    """Read plain values without running what a pickle says."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _read_metadata(store: Store, attempt: str, files: Mapping[str, FileRecord]) -> Metadata:
    """Unpickle the metadata, once its digest has cleared it."""
    key = f"{attempt}/{METADATA}"
    content = read(store, key)
    if not _record_of(store, key, files).is_digest_of(content):
        raise CommitError(f"{store.url}/{key} does not match its digest")
    metadata = pickle.loads(content)
    assert isinstance(metadata, Metadata), "what we have written"
    return metadata


def _record_of(store: Store, key: str, files: Mapping[str, FileRecord]) -> FileRecord:
    record = files.get(key.rsplit("/", 1)[1])
    if record is None:
        raise CommitError(f"{store.url}/{key} is not in the commit's record")
    return record


def _read_items(
    store: Store, attempt: str, files: Mapping[str, FileRecord], metadata: Metadata, planner: DefaultLoadPlanner
) -> None:
    """Read all that the planner asks for, every file from its beginning to its end, by a few readers."""
    wanted: dict[str, list[Wanted]] = {}
    for item in planner.finish_plan(planner.create_local_plan()).items:
        info = metadata.storage_data[item.storage_index]
        wanted.setdefault(info.relative_path, []).append((info, item))
    runs = [(name, run) for name, items in sorted(wanted.items()) for run in _runs(items)]

    def read_run(named: tuple[str, list[Wanted]]) -> None:
        name, run = named
        key = f"{attempt}/{name}"
        with open_checked(store, key, _record_of(store, key, files)) as file:
            for stretch in _stretches(run):
                _read_stretch(file, stretch, planner)

    with ThreadPoolExecutor(_NUM_READERS, "reading") as readers:
        for _ in readers.map(read_run, runs):
            pass


def _runs(items: list[Wanted]) -> Iterator[list[Wanted]]:
    """Cut a file's items, in the order of their places, into runs of some megabytes."""
    run: list[Wanted] = []
    for info, item in sorted(items, key=lambda pair: pair[0].offset):
        run.append((info, item))
        if info.offset + info.length - run[0][0].offset >= _RUN_BYTES:
            yield run
            run = []
    if run:
        yield run


def _stretches(run: list[Wanted]) -> Iterator[list[Wanted]]:
    """Cut a run where the next item does not follow at once."""
    stretch: list[Wanted] = []
    for info, item in run:
        if stretch and info.offset != stretch[-1][0].offset + stretch[-1][0].length:
            yield stretch
            stretch = []
        stretch.append((info, item))
    yield stretch


def _read_stretch(file: CheckedFile, stretch: list[Wanted], planner: DefaultLoadPlanner) -> None:
    """Read adjacent items; none is used before the bytes of all of them are checked."""
    landings = [_landing(info, item, planner) for info, item in stretch]
    file.fill(stretch[0][0].offset, [view for views, _ in landings for view in views])
    for views, finish in landings:
        finish(views)


def _landing(info: _StorageInfo, item: ReadItem, planner: DefaultLoadPlanner) -> Landing:
    """Return where an item's bytes go, and what to do once they are there.

    A tensor's go straight into its own memory if it is complete, contiguous, and on the CPU.
    """
    if item.type == LoadItemType.BYTE_IO:
        return [memoryview(bytearray(info.length))], lambda views: planner.load_bytes(item, io.BytesIO(views[0]))
    target = planner.resolve_tensor(item).detach()
    frame = frame_of(target.dtype, item.lengths)
    if frame.num_bytes != info.length:
        return [memoryview(bytearray(info.length))], lambda views: _unpickle(views, item, target)
    is_direct = target.is_cpu and target.is_contiguous()
    landing = target if is_direct else torch.empty(target.shape, dtype=target.dtype)

    def finish(views: list[memoryview]) -> None:
        if views[0] != frame.head:
            _unpickle(views, item, target)
        elif not is_direct:
            target.copy_(landing)

    return [memoryview(bytearray(frame.head)), bytes_of(landing), memoryview(bytearray(frame.tail))], finish


def _unpickle(views: list[memoryview], item: ReadItem, target: Tensor) -> None:
    """Fill a tensor, by way of torch, from the bytes of one that is larger or framed in another way."""
    stored = torch.load(io.BytesIO(b"".join(views)), weights_only=True)
    for axis, (lo, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        stored = stored.narrow(axis, lo, length)
    target.copy_(stored)


def _mismatches(
    metadata: Metadata, paths: Mapping[str, StatePath], wanted: Mapping[StatePath, object]
) -> Iterator[str]:
    """Describe every wanted leaf that the files lack, or whose kind there is another: copying would convert it."""
    names = {path: name for name, path in paths.items()}
    for path, leaf in wanted.items():
        shown = ".".join(str(part) for part in path)
        stored = metadata.state_dict_metadata.get(names.get(path, ""))
        here, there = _kind_of(leaf), "nothing" if stored is None else _kind_of(stored)
        if here != there:
            yield f"state '{shown}' is {here}, the commit holds {there}; was the model or the optimizer changed?"


def _kind_of(leaf: object) -> str:
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype}"
    if isinstance(leaf, TensorStorageMetadata):
        return f"{tuple(leaf.size)} {leaf.properties.dtype}"
    return "a plain value"


def _destination(stored: object, target: object) -> Tensor | None:
    """Return the tensor to read into, the wanted one if there is one; None for a plain value."""
    if not isinstance(stored, TensorStorageMetadata):
        return None
    return target.detach() if isinstance(target, Tensor) else torch.empty(stored.size, dtype=stored.properties.dtype)
