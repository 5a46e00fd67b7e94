"""Uploads to object storage: a file's bytes leave while they are produced; the object appears when complete.

Nothing is staged on the local disk, which might be full, and memory is bounded: `MOST_UNANSWERED` pieces in flight, and
the one being filled. A file that fits into one piece is sent when complete.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from concurrent.futures import Future
from typing import Any, Protocol

from fsspec.spec import AbstractBufferedFile

from elastic_train.checkpoint.stores.store import Sink
from elastic_train.system.sdk_errors import sdk_errors

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
    """A multipart upload to S3 with several pieces in flight; `file_system` is s3fs's."""

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
