"""A store at any fsspec URL: files are streamed, appear whole, and are verified before they count.

S3 (`If-None-Match: *`) and `memory://` create conditionally. For other file systems a create first claims its key: it
writes a unique marker, and proceeds only if it then sees no other marker and no key. A writer that sees another gives
up, so at most one wins (perhaps none), provided that listings show earlier writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import Any, BinaryIO, Protocol, cast

from fsspec.core import url_to_fs
from fsspec.spec import AbstractBufferedFile

from elastic_train.checkpoint.stores.store import (
    CHANGES,
    Entry,
    FileRecord,
    KeyClaimed,
    KeyMissing,
    KeyTaken,
    NotAllowed,
    ReadFile,
    Sink,
    Store,
    Uncertain,
    no_listener,
)
from elastic_train.errors import ConfigError, StorageError
from elastic_train.system.extras import install_command
from elastic_train.system.wording import sdk_errors

log = logging.getLogger(__name__)

_S3 = {"s3", "s3a"}
_CONDITIONAL = {"memory", *_S3}
_CONFLICT, _PRECONDITION_FAILED = 409, 412
_CONFLICT_TRIES = 5
_MEMORY_LOCK = threading.Lock()  # fsspec's memory file system checks before it writes, not atomically
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")


class FsspecStore:
    """Keys are paths below the URL; `options` go to the file system's constructor (endpoint, credentials)."""

    def __init__(self, url: str, options: Mapping[str, object] | None = None) -> None:
        self._url = url.rstrip("/")
        try:
            self._fs, root = url_to_fs(self._url, use_listings_cache=False, skip_instance_cache=True, **(options or {}))
        except (ValueError, ImportError) as error:
            remedy = install_command(error) or "give a folder or an fsspec URL"
            raise ConfigError(f"{url}: cannot be opened: {error}; {remedy}") from error
        self._root = str(root).rstrip("/")
        protocol = self._fs.protocol if isinstance(self._fs.protocol, str) else self._fs.protocol[0]
        self._is_conditional = protocol in _CONDITIONAL
        self._upload: Callable[[Any, str], Upload] = S3Upload if protocol in _S3 else FileUpload
        self._guard = _MEMORY_LOCK if protocol == "memory" else contextlib.nullcontext()
        self._errors = sdk_errors(OSError)
        if not self._is_conditional:
            log.warning(
                "%s: %s has no conditional create; keys are claimed with marker files instead", self._url, protocol
            )

    @property
    def url(self) -> str:
        return self._url

    def create(self, key: str, content: bytes) -> None:
        if not self._is_conditional:
            return self._create_claimed(key, content)
        for _ in range(_CONFLICT_TRIES):
            try:
                with self._guard:
                    self._fs.pipe_file(self._path(key), content, mode="create")
                return None
            except FileExistsError as error:
                raise KeyTaken(f"{self._url}/{key}: exists already") from error
            except self._errors as error:
                status = _http_status(error)
                if status == _PRECONDITION_FAILED:
                    raise KeyTaken(f"{self._url}/{key}: exists already") from error
                if status != _CONFLICT:
                    raise Uncertain(f"{self._url}/{key}: create was not confirmed: {error}") from error
        raise Uncertain(f"{self._url}/{key}: create met a conflict {_CONFLICT_TRIES} times")

    def _create_claimed(self, key: str, content: bytes) -> None:
        """Create without the store's help; the module docstring explains why at most one caller wins."""
        marker = f"claims/{key}/{uuid.uuid4().hex}"
        with self._translating("create", key):
            self._fs.pipe_file(self._path(marker), b"")
        try:
            rivals = [entry.key for entry in self.list(f"claims/{key}/") if entry.key != marker]
            if self._exists(key):
                raise KeyTaken(f"{self._url}/{key}: exists already")
            if rivals:
                raise KeyClaimed(f"{self._url}/{key}: another writer is claiming it")
            try:
                with self._translating("create", key):
                    self._fs.pipe_file(self._path(key), content)
            except StorageError as error:
                raise Uncertain(f"{self._url}/{key}: create was not confirmed: {error}") from error
        finally:
            with contextlib.suppress(StorageError):  # the marker of a key that exists is in nobody's way
                self.delete(marker)

    @contextlib.contextmanager
    def write(self, key: str) -> Iterator[Sink]:
        """Stream a file; a failed upload is discarded, and a finished one is compared by size."""
        with self._translating("write", key):
            sink = _Counting(self._upload(self._fs, self._path(key)))
            try:
                yield sink
                sink.upload.finish()
            except BaseException:
                sink.upload.discard()
                raise
            self._fs.invalidate_cache()
            if (size := self._fs.info(self._path(key))["size"]) != sink.size:
                self.delete(key)
                raise StorageError(f"{self._url}/{key}: {size} bytes of {sink.size} arrived")

    def open(self, key: str) -> BinaryIO:
        with self._translating("read", key):
            self._fs.invalidate_cache()
            file: BinaryIO = self._fs.open(self._path(key), "rb")
        return cast(BinaryIO, ReadFile(file, lambda: self._translating("read", key)))

    def list(self, prefix: str) -> list[Entry]:
        with self._translating("list", prefix):
            self._fs.invalidate_cache()
            found: dict[str, Mapping[str, object]] = self._fs.find(self._path(prefix), detail=True)
        start = len(self._path(""))
        entries = (self._entry(path[start:], details) for path, details in found.items())
        return sorted(entries, key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        with self._translating("delete", key), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))

    def drop_unfinished(self, prefix: str, before: float, *, is_rehearsal: bool = False) -> Sequence[str]:
        if self._upload is not S3Upload:
            return []
        with self._translating("abort unfinished uploads below", prefix):
            paths = abort_uploads(self._fs, self._path(prefix), before, is_rehearsal=is_rehearsal)
        return sorted(path.removeprefix(self._path("")) for path in paths)

    def near(self, files: Mapping[str, FileRecord], on_progress: Callable[[], None] = no_listener) -> Store:
        return self

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _exists(self, key: str) -> bool:
        with self._translating("read", key):
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self._path(key)))

    def _entry(self, key: str, details: Mapping[str, object]) -> Entry:
        size = details["size"]
        assert isinstance(size, int), f"{self._url}/{key}: the listing gives no size"
        return Entry(key, size, _modified_at(details))

    @contextlib.contextmanager
    def _translating(self, act: str, key: str) -> Iterator[None]:
        """Turn errors of the file system's SDK into StorageError."""
        try:
            yield
        except FileNotFoundError as error:
            raise KeyMissing(f"{self._url}/{key}: does not exist") from error
        except self._errors as error:
            is_refused = act in CHANGES and isinstance(error, PermissionError)
            kind = NotAllowed if is_refused else StorageError
            raise kind(f"{self._url}/{key}: cannot {act}: {error}") from error


class _Counting:
    """Counts the bytes given to an upload."""

    def __init__(self, upload: Upload) -> None:
        self.upload, self.size = upload, 0

    def write(self, content: bytes | memoryview, /) -> int:
        num_bytes = self.upload.write(content)
        self.size += num_bytes
        return num_bytes


def _modified_at(details: Mapping[str, object]) -> float | None:
    """Return unix seconds from a listing's entry; file systems differ in name and type of the field."""
    moment = next((details[name] for name in _TIMES if details.get(name)), None)
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment)
    if isinstance(moment, datetime):
        return moment.timestamp()
    return float(moment) if isinstance(moment, int | float) else None


def _http_status(error: BaseException) -> int | None:
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    if not isinstance(response, dict):
        return None
    status: object = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else None


__all__ = ["FsspecStore"]


PIECE_BYTES = 16 << 20
"""Well above S3's minimum of 5 MiB."""
MOST_UNANSWERED = 8
_PIECES_OF_A_SIZE = 1000
"""S3 allows 10,000 pieces per object: each further thousand are larger by `PIECE_BYTES`, for 860 GiB in all."""


class Upload(Sink, Protocol):
    """A file being uploaded; `finish` or `discard` must be called at its end."""

    def finish(self) -> None:
        """Return when the object exists."""

    def discard(self) -> None:
        """Give up: no object appears, and received pieces are removed as far as the storage allows."""


class S3Upload:
    """A multipart upload to S3 with several pieces in flight; `file_system` is s3fs's.

    Nothing is staged on the local disk, which might be full, and memory is bounded: `MOST_UNANSWERED` pieces in
    flight, and the one being filled. A file that fits into one piece is sent when complete.
    """

    def __init__(self, file_system: Any, path: str) -> None:
        self._fs = file_system
        self._bucket, self._key, _ = file_system.split_path(path)
        self._filling = bytearray()
        self._upload_id: str | None = None
        self._num_sent = 0
        self._unanswered: deque[Future[dict[str, Any]]] = deque()
        self._parts: list[dict[str, object]] = []

    def write(self, content: bytes | memoryview, /) -> int:
        view = memoryview(content).cast("B")
        done = 0
        while done < len(view):
            room = self._piece_bytes - len(self._filling)
            self._filling += view[done : done + room]
            done += min(room, len(view) - done)
            if len(self._filling) == self._piece_bytes:
                self._send()
        return len(view)

    def finish(self) -> None:
        if self._upload_id is None:
            self._begin("put_object", Body=bytes(self._filling)).result()
            return
        if self._filling:
            self._send()
        while self._unanswered:
            self._take_answer()
        parts = {"Parts": self._parts}
        self._begin("complete_multipart_upload", UploadId=self._upload_id, MultipartUpload=parts).result()

    def discard(self) -> None:
        for answer in self._unanswered:
            answer.cancel()
        if self._upload_id is not None:
            with contextlib.suppress(*sdk_errors(OSError)):
                self._begin("abort_multipart_upload", UploadId=self._upload_id).result()

    @property
    def _piece_bytes(self) -> int:
        return PIECE_BYTES * (1 + self._num_sent // _PIECES_OF_A_SIZE)

    def _send(self) -> None:
        """Start to send the filled piece, once few enough are in flight."""
        if self._upload_id is None:
            self._upload_id = str(self._begin("create_multipart_upload").result()["UploadId"])
        while len(self._unanswered) >= MOST_UNANSWERED:
            self._take_answer()
        self._num_sent += 1
        piece, self._filling = bytes(self._filling), bytearray()
        self._unanswered.append(
            self._begin("upload_part", UploadId=self._upload_id, PartNumber=self._num_sent, Body=piece)
        )

    def _take_answer(self) -> None:
        answer = self._unanswered.popleft().result()
        checksums = {name: value for name, value in answer.items() if name.startswith("Checksum")}
        checksums.pop("ChecksumType", None)
        self._parts.append({"PartNumber": len(self._parts) + 1, "ETag": answer["ETag"], **checksums})

    def _begin(self, method: str, **arguments: object) -> Future[dict[str, Any]]:
        """Call the storage on s3fs's thread, which retries what is worth it."""
        call = self._fs._call_s3(method, Bucket=self._bucket, Key=self._key, **arguments)
        return asyncio.run_coroutine_threadsafe(call, self._fs.loop)


def abort_uploads(file_system: Any, folder: str, before: float, *, is_rehearsal: bool = False) -> list[str]:
    """Abort S3 uploads below a folder that were begun before a time; return their objects' paths."""
    bucket, prefix, _ = file_system.split_path(folder)

    def ask(method: str, **arguments: object) -> dict[str, Any]:
        call = file_system._call_s3(method, Bucket=bucket, **arguments)
        answer: dict[str, Any] = asyncio.run_coroutine_threadsafe(call, file_system.loop).result()
        return answer

    aborted, after = [], dict[str, str]()
    while True:
        page = ask("list_multipart_uploads", Prefix=prefix, **after)
        for upload in page.get("Uploads", ()):
            if not upload["Key"].startswith(prefix) or upload["Initiated"].timestamp() >= before:
                continue
            if not is_rehearsal:
                with contextlib.suppress(FileNotFoundError):  # finished or aborted meanwhile
                    ask("abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"])
            aborted.append(f"{bucket}/{upload['Key']}")
        if not page.get("IsTruncated"):
            return aborted
        after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


class FileUpload:
    """A file of any other fsspec file system, which may show it before it is complete; `discard` removes it."""

    def __init__(self, file_system: Any, path: str) -> None:
        self._fs, self._path = file_system, path
        self._filling = bytearray()
        self._file: Any = None

    def write(self, content: bytes | memoryview, /) -> int:
        self._filling += content
        if len(self._filling) >= PIECE_BYTES:
            if self._file is None:
                self._file = self._fs.open(self._path, "wb", block_size=PIECE_BYTES)
            self._pass()
        return len(content)

    def finish(self) -> None:
        if self._file is None:
            self._fs.pipe_file(self._path, bytes(self._filling))
            return
        self._pass()
        self._file.close()

    def discard(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(*sdk_errors(OSError)):
            if isinstance(self._file, AbstractBufferedFile):
                self._file.closed = True  # closing it, now or when collected, would publish its content
                self._file.discard()
            else:
                self._file.close()
            self._fs.rm_file(self._path)

    def _pass(self) -> None:
        self._file.write(bytes(self._filling))
        self._filling = bytearray()
