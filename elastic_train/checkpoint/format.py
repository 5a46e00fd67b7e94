"""The files of a checkpoint: the format of torch.distributed.checkpoint, written to and read from a store.

Its own planner, writer and reader do the work, over a file system that is our store and computes or checks every
checksum on the way. Nothing here talks to another rank: with replicated state every rank can compute the whole plan,
write its part, and hand what it wrote to whoever finishes. Objects other than tensors are plain values: they are
written only if they can be read back without trusting a pickle.

Not used of torch's: several writer threads (they swallow errors), its fsync (before the flush), its rename (a store
has none), its load of pickled objects, and the wrappers that raise outside of `Exception`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from elastic_train.checkpoint.checksums import FileRecord, HashingSink, open_checked
from elastic_train.checkpoint.record import Path
from elastic_train.checkpoint.stores import Store, read
from elastic_train.errors import CommitError, ConfigError

State = dict[str, object]
METADATA = ".metadata"
_BEING_WRITTEN = ".tmp"


class AttemptFiles(FileSystemBase):
    """An attempt's folder in a store, as torch's checkpoint code sees a file system.

    `files` are the records of what was written, or what reads are checked against.
    """

    def __init__(self, store: Store, attempt: str, files: dict[str, FileRecord]) -> None:
        self._store = store
        self._attempt = attempt
        self._unnamed: dict[str, bytes] = {}
        self.files = files

    @contextlib.contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        name = str(path)
        if mode == "rb":
            with open_checked(self._store, f"{self._attempt}/{name}", self._record_of(name)) as file:
                yield file
        elif name.endswith(_BEING_WRITTEN):
            with io.BytesIO() as held:
                yield held
                self._unnamed[name] = held.getvalue()
        else:
            with self._writing(name) as sink:
                yield sink

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[HashingSink]:
        with self._store.write(f"{self._attempt}/{name}") as file:
            sink = HashingSink(file)
            try:
                yield sink
                sink.close()
            except RuntimeError:
                if sink.failure is None:
                    raise
                raise sink.failure from None
        self.files[name] = sink.record()

    def rename(self, path: str | PathLike[str], new_path: str | PathLike[str]) -> None:
        """Write what was held back under its final name."""
        with self._writing(str(new_path)) as sink:
            sink.write(self._unnamed.pop(str(path)))

    def metadata(self) -> bytes:
        """Return the pickled metadata, once its SHA-256 has cleared it."""
        record = self._record_of(METADATA)
        content = read(self._store, f"{self._attempt}/{METADATA}")
        if hashlib.sha256(content).hexdigest() != record.sha256:
            raise CommitError(f"{self._store.url}/{self._attempt}/{METADATA} does not match its SHA-256")
        return content

    def concat_path(self, path: str | PathLike[str], suffix: str) -> str:
        return suffix

    def init_path(self, path: str | PathLike[str]) -> str:
        return str(path)

    def mkdir(self, path: str | PathLike[str]) -> None:
        """Do nothing: a store has no folders."""

    def exists(self, path: str | PathLike[str]) -> bool:
        return str(path) in self.files

    def rm_file(self, path: str | PathLike[str]) -> None:
        raise AssertionError(f"{path}: an attempt's files are never replaced")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        return True

    def _record_of(self, name: str) -> FileRecord:
        record = self.files.get(name)
        if record is None:
            raise CommitError(f"{self._store.url}/{self._attempt}/{name} is not in the commit's record")
        return record


@dataclass(frozen=True, slots=True)
class AttemptPlan:
    """Who writes what: the same on every rank that plans the same state for the same number of parts."""

    planner: DefaultSavePlanner
    parts: Sequence[SavePlan]
    metadata: Metadata


def plan_attempt(state: State, num_parts: int = 1) -> AttemptPlan:
    """Plan the files of a replicated state, spread over `num_parts` writers by size; reads no tensor's values."""
    planner = _PlainSavePlanner()
    try:
        planner.set_up_planner(state, is_coordinator=True)
    except ValueError as error:  # two paths that read alike, such as a -> b.c and a.b -> c
        raise ConfigError(f"the state cannot be saved: {error}; rename one of them") from error
    local = planner.create_local_plan()
    parts, metadata = planner.create_global_plan([local] * num_parts)
    return AttemptPlan(planner, parts, metadata)


def write_part(
    store: Store, attempt: str, plan: AttemptPlan, part: int
) -> tuple[list[WriteResult], dict[str, FileRecord]]:
    """Write one part's file; return what `finish_attempt` needs of it."""
    writer, files = _open_writer(store, attempt)
    numbered = writer.prepare_global_plan(list(plan.parts))[part]
    results = writer.write_data(plan.planner.finish_plan(numbered), plan.planner).wait()
    return results, files.files


def finish_attempt(
    store: Store, attempt: str, plan: AttemptPlan, written: Sequence[tuple[list[WriteResult], dict[str, FileRecord]]]
) -> dict[str, FileRecord]:
    """Write the metadata that joins all parts; return the records of all files."""
    writer, files = _open_writer(store, attempt)
    writer.finish(plan.metadata, [results for results, _ in written])
    return {name: record for _, part in [*written, ([], files.files)] for name, record in part.items()}


def read_leaves(
    store: Store, attempt: str, files: Mapping[str, FileRecord], wanted: Mapping[Path, object]
) -> dict[Path, object]:
    """Read every tensor and plain value by its path; tensors among `wanted` are filled in place.

    Raises ConfigError, before anything is changed, if a wanted leaf is not in the files or is of another kind there.
    """
    attempt_files = AttemptFiles(store, attempt, dict(files))
    metadata: Metadata = pickle.loads(attempt_files.metadata())
    paths: dict[str, Path] = {name: tuple(path) for name, path in metadata.planner_data.items()}
    problems = list(_mismatches(metadata, paths, wanted))
    if problems:
        raise ConfigError(*problems)
    reader = FileSystemReader(attempt)
    reader.fs = attempt_files  # type: ignore[assignment]  # the seam that torch's own fsspec reader uses
    planner = _PlainLoadPlanner(flatten_state_dict=False)
    leaves = {
        name: _destination(stored, wanted.get(paths[name])) for name, stored in metadata.state_dict_metadata.items()
    }
    planner.set_up_planner(leaves, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    try:
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise CommitError(f"{store.url}/{attempt}: cannot be read: {error}") from error
    return {paths[name]: value for name, value in planner.state_dict.items()}


class _PlainSavePlanner(DefaultSavePlanner):
    """Refuse a value that could not be read back without trusting a pickle."""

    def transform_object(self, write_item: WriteItem, object: object) -> object:
        written = super().transform_object(write_item, object)
        if write_item.type == WriteItemType.BYTE_IO:
            try:
                written.seek(0)
                torch.load(written, weights_only=True)
            except pickle.UnpicklingError as error:
                kind = type(object).__qualname__
                raise ConfigError(
                    f"state '{write_item.index.fqn}' is a {kind}; a checkpoint holds tensors and plain values only"
                ) from error
        return written


class _PlainLoadPlanner(DefaultLoadPlanner):
    """Read plain values without running what a pickle says."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _open_writer(store: Store, attempt: str) -> tuple[FileSystemWriter, AttemptFiles]:
    writer = FileSystemWriter(attempt, sync_files=False, thread_count=1)
    files = AttemptFiles(store, attempt, {})
    writer.fs = files  # type: ignore[assignment]  # the seam that torch's own fsspec writer uses
    return writer, files


def _mismatches(metadata: Metadata, paths: Mapping[str, Path], wanted: Mapping[Path, object]) -> Iterator[str]:
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
