"""Write checkpoint files in the format of torch.distributed.checkpoint, and hash weights; `reading` reads the files.

torch's planners list a state's items and assign them to files; its metadata records every location. Bytes go directly
between memory and store (see `frames`), with all checksums computed or checked on the way. There is no communication:
every rank computes the same plan and writes its part. Objects other than tensors are plain values, all in part 0,
written only if they can be read back without trusting a pickle.

Not used from torch: its writer (it swallows errors of threads, syncs before the flush, renames where a store cannot),
its loading of pickled objects, and wrappers that raise outside of `Exception`.

One hash for all weights is equal if and only if every weight and buffer is bit-identical. It hashes the tensors'
hashes, and these hash their grains' hashes, so that ranks with parts can compute theirs separately.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from isal.isal_zlib import crc32
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta

from elastic_train.checkpoint.format.layout import AttemptPlan, Leaves, Part, Slot, bytes_of
from elastic_train.checkpoint.stores.checksums import HashingSink, HashingThread
from elastic_train.checkpoint.stores.store import FileRecord, Store, no_listener
from elastic_train.parallel.devices.squares import in_memory_order
from elastic_train.placement.grains import Cut, CutDims, bounds_of, cut_along, digests_of, join_grains
from rendezvous.waiting import Call

_MOST_BEHIND = 64
"""Staged tensors whose SHA-256, slower than the disk, may still be pending after they are written."""
METADATA = ".metadata"

GrainRun = tuple[int, str]
"""Consecutive grains of a tensor: index of the first, and the hex SHA-256s of all, concatenated."""


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenPart:
    """A part in the store: its file, the locations of its plain values (offset, length), and digests of weights.

    `digests` are of whole tensors, `grains` of runs of grains of tensors in pieces; both by name.
    """

    name: str
    file: FileRecord
    plain: Mapping[str, tuple[int, int]]
    digests: Mapping[str, str]
    grains: Mapping[str, tuple[GrainRun, ...]] = dataclasses.field(default_factory=dict)


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
    """Write one part's file: its tensors in slot order, then encoded plain values.

    About `most_behind` tensors are held in addition to the one being written. `on_progress` is called when the file is
    open, for every piece, and when the file is durable.
    """
    places: dict[str, tuple[int, int]] = {}
    with (
        store.write(f"{attempt}/{part.name}") as file,
        HashingSink(file, on_progress) as sink,
        HashingThread(most_behind) as digesting,
    ):
        weights = _WeightDigests(digesting)
        on_progress()
        for slot, content in zip(part.slots, contents, strict=True):
            weights.begin(slot, content)
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
    return WrittenPart(part.name, sink.record(), places, weights.whole(), weights.grains())


class _WeightDigests:
    """The digests of a part's weights, computed in order on a thread."""

    def __init__(self, digesting: HashingThread) -> None:
        self._digesting = digesting
        self._whole: dict[str, Call[str]] = {}
        self._runs: dict[str, list[GrainRunHash]] = {}
        self._updates: list[Call[None]] = []
        self._end: tuple[str, int] | None = None

    def begin(self, slot: Slot, content: memoryview) -> None:
        """Start the digest of a written slot if it is a weight's; boxes come in order."""
        name = slot.weight
        if name is None:
            return
        if slot.span is None:
            self._whole[name] = self._digesting.do(partial(tensor_digest, slot.dtype, slot.whole, content, slot.cut))
            return
        lo, hi = slot.span
        runs = self._runs.setdefault(name, [])
        if self._end != (name, lo):
            bounds = bounds_of(tuple(slot.whole), slot.cut)
            runs.append(GrainRunHash(bounds, lo, slot.dtype.itemsize))
        self._updates.append(self._digesting.do(partial(runs[-1].update, content)))
        self._end = name, hi

    def whole(self) -> dict[str, str]:
        """Return the digests of whole tensors by name, once the thread has ended."""
        return {name: digest.result() for name, digest in self._whole.items()}

    def grains(self) -> dict[str, tuple[GrainRun, ...]]:
        """Return the grain digests of tensors in pieces by name, once the thread has ended."""
        for update in self._updates:
            update.result()
        return {name: tuple(run.digests() for run in runs) for name, runs in self._runs.items()}


def live_contents(part: Part, leaves: Leaves) -> Iterator[memoryview]:
    """Yield the bytes of a part's tensors without a copy, or copied one at a time from a device."""
    for slot in part.slots:
        yield bytes_of(slot.memory(leaves).detach().cpu().contiguous())


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


def weights_sha256(plan: AttemptPlan, written: Sequence[WrittenPart]) -> str:
    """Return the SHA-256 over all weights and buffers, independent of cuts and number of writers."""
    digests = {name: digest for part in written for name, digest in part.digests.items()}
    runs: dict[str, list[GrainRun]] = {}
    for part in written:
        for name, found in part.grains.items():
            runs.setdefault(name, []).extend(found)
    for slot in (slot for part in plan.parts for slot in part.slots if slot.span is not None):
        weight = slot.weight
        if weight is not None and weight not in digests:
            digests[weight] = join_runs(slot.dtype, slot.whole, slot.cut, runs.get(weight, ()))
    return join_digests(digests)


def weights_digest(model: nn.Module, dims: CutDims) -> str:
    """Return the SHA-256 over all weights and buffers: names in order, dtypes, shapes, bytes."""
    named = model.state_dict().items()
    return join_digests({name: digest_of(tensor, dims.get(name)) for name, tensor in named})


def tensor_digest(dtype: torch.dtype, shape: torch.Size, content: memoryview, cut: Cut | None = None) -> str:
    """Return the SHA-256 over dtype, shape and grain SHA-256s of one tensor, from its bytes in memory order."""
    grains = digests_of(content, dtype.itemsize, bounds_of(tuple(shape), cut))
    return join_grains(str(dtype), shape, cut, grains)


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes: detects differences between ranks in a sixth of SHA-256's time."""
    return crc32(bytes_of(tensor.detach().cpu().contiguous()))


def digest_of(tensor: Tensor, dim: int | None = None) -> str:
    """Return the digest of one tensor, which may be split along `dim`."""
    cut = cut_along(tensor.shape, dim)
    content = bytes_of(in_memory_order(tensor.detach(), cut).cpu())
    return tensor_digest(tensor.dtype, tensor.shape, content, cut)


def join_digests(digests: Mapping[str, str]) -> str:
    """Return the SHA-256 of named tensor digests, in name order."""
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


class GrainRunHash:
    """Hashes consecutive grains of a tensor incrementally, from the one that begins at element `lo`.

    `bounds` are the boundaries of all the tensor's grains.
    """

    def __init__(self, bounds: Sequence[int], lo: int, itemsize: int) -> None:
        self._first = bisect_left(bounds, lo)
        assert bounds[self._first] == lo, f"element {lo} begins no grain"
        self._bounds, self._itemsize = bounds, itemsize
        self._done: list[str] = []
        self._grain, self._num_hashed = hashlib.sha256(), 0

    def update(self, content: memoryview) -> None:
        """Hash the next bytes; they may end anywhere in a grain."""
        rest = content.cast("B")
        while len(rest):
            number = self._first + len(self._done)
            missing = (self._bounds[number + 1] - self._bounds[number]) * self._itemsize - self._num_hashed
            piece, rest = rest[:missing], rest[missing:]
            self._grain.update(piece)
            self._num_hashed += len(piece)
            if len(piece) == missing:
                self._done.append(self._grain.hexdigest())
                self._grain, self._num_hashed = hashlib.sha256(), 0

    def digests(self) -> GrainRun:
        """Return the digests, once all bytes were given."""
        assert not self._num_hashed, "a grain has ended nowhere"
        return self._first, "".join(self._done)


def join_runs(dtype: torch.dtype, shape: torch.Size, cut: Cut | None, runs: Iterable[GrainRun]) -> str:
    """Return a tensor's digest from those of all its grains, whoever hashed them."""
    grains: list[bytes] = []
    for first, digests in sorted(runs):
        assert first == len(grains), f"grain {first} follows {len(grains)} grains"
        joined = bytes.fromhex(digests)
        grains += [joined[at : at + SHA256_BYTES] for at in range(0, len(joined), SHA256_BYTES)]
    expected = len(bounds_of(tuple(shape), cut)) - 1
    assert len(grains) == expected, f"{len(grains)} of {expected} grains of a tensor of shape {tuple(shape)}"
    return join_grains(str(dtype), shape, cut, grains)


SHA256_BYTES = hashlib.sha256().digest_size
