"""Sources of a dataset's bytes: local files, or ranges of any fsspec URL, retried, and hedged if slow.

A remote range is read by a pool thread (S3 by plain HTTP, see `SignedRanges`), retried after a failure, and requested a
second time when it takes longer than all but a few others did (Dean, Barroso: The Tail at Scale, 2013). Local files are
read in the calling thread, without the interpreter's lock. pyarrow only sees ranges already in memory: decoding never
waits for a network, and decodes the bytes that were checked. Only ranges that a row group needs are read, but near ones
are joined where each costs a request.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import logging
import os
import select
import ssl
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

import fsspec
import fsspec.implementations.chained
import fsspec.implementations.local
import pyarrow as pa
import tenacity

from elastic_train.errors import DataError
from elastic_train.system.extras import install_command
from elastic_train.system.wording import sdk_errors
from rendezvous.pauses import RandomExponential

Range = tuple[int, int]
Content = memoryview

MAX_GAP = 64 << 10
NUM_FETCHERS = 32
TRIES, FIRST_PAUSE_S, LONGEST_PAUSE_S = 5, 0.1, 5.0
HEDGED_SHARE, SOONEST_HEDGE_S, NUM_REMEMBERED = 0.05, 0.1, 128
MOST_HEDGES_SAVED = 8.0
"""Limit on saved-up second requests; if all ranges are late, second requests would only make it worse."""

_LOCK = threading.Lock()
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError)


class Source(Protocol):
    """The files below one URL; raises OSError for unreadable ones. All methods are thread-safe."""

    def size(self, path: str) -> int:
        """Return a file's size in bytes."""

    def read(self, path: str, lo: int, hi: int) -> bytes:
        """Return the bytes [lo, hi) of a file; fewer at its end."""

    def open(self, path: str, ranges: Sequence[Range], *, is_again: bool = False) -> Fetched:
        """Return a file for pyarrow, of which only the given ranges can be read.

        With `is_again` the ranges come from storage, not from the machine's memory.
        """


def open_source(url: str) -> Source:
    """Return the source of a folder or fsspec URL."""
    filesystem, root = fsspec.core.url_to_fs(url)
    if "file" in filesystem.protocol:
        return LocalSource(root)
    return RemoteSource(filesystem, str(root).rstrip("/"))


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """Raise DataError if a location cannot be used: unknown protocol, missing package, no answer, no access."""
    try:
        yield
    except (ImportError, ValueError) as error:
        remedy = install_command(error) or "a folder or an fsspec URL is needed"
        raise DataError(f"{url}: cannot be opened: {error}; {remedy}") from error
    except sdk_errors() as error:
        raise DataError(
            f"{url}: cannot be reached: {error}; check the address, and the store's credentials and endpoint"
        ) from error
    except OSError as error:
        raise DataError(f"{url}: cannot be read: {error}") from error


def join_near(ranges: Sequence[Range], max_gap: int = MAX_GAP) -> list[Range]:
    """Join half-open ranges that touch, overlap, or are at most `max_gap` bytes apart; sorted."""
    joined: list[Range] = []
    for lo, hi in sorted(ranges):
        if joined and lo - joined[-1][1] <= max_gap:
            joined[-1] = (joined[-1][0], max(hi, joined[-1][1]))
        else:
            joined.append((lo, hi))
    return joined


class LocalSource:
    """Files of a local folder."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def size(self, path: str) -> int:
        return (self._root / path).stat().st_size

    def read(self, path: str, lo: int, hi: int) -> bytes:
        with (self._root / path).open("rb") as file:
            file.seek(lo)
            return file.read(hi - lo)

    def open(self, path: str, ranges: Sequence[Range], *, is_again: bool = False) -> Fetched:
        file = os.open(self._root / path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if is_again:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            return Fetched({range_: _pread(file, *range_) for range_ in join_near(ranges, 0)})
        finally:
            os.close(file)


def _pread(file: int, lo: int, hi: int) -> Content:
    """Read a range of an open file; fewer bytes at its end."""
    content = memoryview(pa.allocate_buffer(hi - lo)).cast("B")
    at = 0
    while at < len(content) and (size := os.preadv(file, [content[at:]], lo + at)):
        at += size
    return content[:at]


class RemoteSource:
    """Files of an fsspec file system, read range by range."""

    def __init__(self, filesystem: fsspec.AbstractFileSystem, root: str) -> None:
        self._filesystem, self._root = filesystem, root
        self._signed = _signed(filesystem)
        self._pool: ThreadPoolExecutor | None = None
        self._took_s: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._hedges_left = MOST_HEDGES_SAVED

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_pool": None, "_signed": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._signed = _signed(self._filesystem)

    def size(self, path: str) -> int:
        with _as_os_errors():
            return int(_again(self._filesystem.size, f"{self._root}/{path}"))

    def read(self, path: str, lo: int, hi: int) -> bytes:
        return bytes(self._content(path, lo, hi))

    def _content(self, path: str, lo: int, hi: int) -> Content:
        """Read a range: by a signed address if that works at once, else through fsspec with retries."""
        whole = f"{self._root}/{path}"
        if self._signed is not None and (content := self._signed.read(whole, lo, hi)) is not None:
            return content
        with _as_os_errors():
            return memoryview(_again(self._filesystem.cat_file, whole, start=lo, end=hi))

    def open(self, path: str, ranges: Sequence[Range], *, is_again: bool = False) -> Fetched:
        joined = join_near(ranges)
        first = [self._submit(path, range_) for range_ in joined]
        with _LOCK:
            self._hedges_left = min(MOST_HEDGES_SAVED, self._hedges_left + HEDGED_SHARE * len(first))
        return Fetched(dict(zip(joined, map(self._hedge, [path] * len(joined), joined, first), strict=True)))

    def _submit(self, path: str, range_: Range) -> Future[Content]:
        with _LOCK:
            self._pool = self._pool or ThreadPoolExecutor(NUM_FETCHERS, "fetch")
        return self._pool.submit(self._timed, path, range_)

    def _timed(self, path: str, range_: Range) -> Content:
        started_s = time.monotonic()
        content = self._content(path, *range_)
        self._took_s.append(time.monotonic() - started_s)
        return content

    def _hedge(self, path: str, range_: Range, first: Future[Content]) -> Content:
        """Wait for a range; request it a second time if it is late and few others were, and take the first answer."""
        started_s = time.monotonic()
        while not wait([first], SOONEST_HEDGE_S).done:
            if time.monotonic() - started_s >= self._late_after_s() and self._may_hedge():
                break
        else:
            return first.result()
        second = self._submit(path, range_)
        done, late = wait([first, second], return_when=FIRST_COMPLETED)
        if all(future.exception() for future in done):
            return next(iter(late or done)).result()
        return next(future for future in done if not future.exception()).result()

    def _may_hedge(self) -> bool:
        """Spend one of the second requests earned by the first ones."""
        with _LOCK:
            is_earned = self._hedges_left >= 1
            self._hedges_left -= is_earned
        return is_earned

    def _late_after_s(self) -> float:
        """Return the time that all but a few of the last ranges took."""
        took_s = sorted(self._took_s)
        return max(SOONEST_HEDGE_S, took_s[int((1 - HEDGED_SHARE) * len(took_s))] if took_s else LONGEST_PAUSE_S)


def _signed(filesystem: fsspec.AbstractFileSystem) -> SignedRanges | None:
    return SignedRanges(filesystem) if "s3" in filesystem.protocol else None


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise OSError in place of a file system SDK's errors."""
    try:
        yield
    except sdk_errors() as error:
        raise OSError(str(error)) from error


class Fetched(io.RawIOBase):
    """A file with some ranges in memory; pyarrow reads each column chunk with one call."""

    def __init__(self, parts: dict[Range, Content]) -> None:
        super().__init__()
        self._parts, self._at = parts, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence != io.SEEK_CUR, "pyarrow seeks from the start, or to the end for the size"
        self._at = offset + (max(hi for _, hi in self._parts) if whence == io.SEEK_END else 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> Content:
        lo, self._at = self._at, self._at + size
        return self.part(lo, self._at)

    def part(self, lo: int, hi: int) -> Content:
        """Return the bytes [lo, hi), without a copy; fewer at the file's end."""
        for (first, end), content in self._parts.items():
            if first <= lo and hi <= end:
                return content[lo - first : hi - first]
        raise OSError(f"bytes [{lo}, {hi}) were not fetched")


_again = tenacity.Retrying(
    retry=tenacity.retry_if_exception(lambda error: isinstance(error, Exception) and not isinstance(error, _FINAL)),
    stop=tenacity.stop_after_attempt(TRIES),
    wait=RandomExponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
    reraise=True,
)


SIGNED_FOR_S, SIGN_AGAIN_AFTER_S = 3600, 600
TIMEOUT_S = 15.0
MOST_FAILURES = 32
"""Consecutive failures, without one successful range, after which signed addresses are suspended."""

_LOG = logging.getLogger(__name__)


class SignedRanges:
    """Reads ranges of objects of an S3 file system; thread-safe.

    Read ranges of S3 objects by plain HTTP: fsspec signs an object's address, and every range is a bare GET.

    A client that signs, parses and checks each request in Python costs more than decoding the result; this one
    reads a body straight into Arrow's memory, in the calling thread, over that thread's own connection.
    Credentials, endpoint and addressing are fsspec's. Any failure returns None, and fsspec is asked, which retries
    and knows the errors. Where this does not work at all (behind a proxy, with another way of signing) it is
    suspended for a while.
    """

    def __init__(self, filesystem: fsspec.AbstractFileSystem) -> None:
        self._filesystem = filesystem
        self._addresses: dict[str, tuple[SplitResult, float]] = {}
        self._of_thread = threading.local()
        self._num_failures, self._idle_until_s = 0, 0.0

    def read(self, path: str, lo: int, hi: int) -> memoryview | None:
        """Return the bytes [lo, hi) of an object, fewer at its end; None on failure."""
        if time.monotonic() < self._idle_until_s:
            return None
        try:
            content = self._get(self._address(path), lo, hi)
        except Exception as error:  # noqa: BLE001 - whatever it is, fsspec is asked next, and says it
            self._addresses.pop(path, None)
            self._num_failures += 1
            if self._num_failures >= MOST_FAILURES:
                self._num_failures, self._idle_until_s = 0, time.monotonic() + SIGN_AGAIN_AFTER_S
                _LOG.warning(
                    "%s: presigned addresses do not work (%s); reading through fsspec for now, which is slower",
                    path,
                    error,
                )
            return None
        self._num_failures = 0
        return content

    def _address(self, path: str) -> SplitResult:
        address, signed_s = self._addresses.get(path, (None, 0.0))
        if address is None or time.monotonic() - signed_s > SIGN_AGAIN_AFTER_S:
            address = urlsplit(self._signer.sign(path, expiration=SIGNED_FOR_S))
            self._addresses[path] = address, time.monotonic()
        return address

    @cached_property
    def _signer(self) -> fsspec.AbstractFileSystem:
        """The same file system with version 4 signatures: newer buckets in some regions refuse boto's default."""
        options = self._filesystem.storage_options
        config = {"signature_version": "s3v4", **(options.get("config_kwargs") or {})}
        if options.get("anon"):
            return self._filesystem
        return fsspec.filesystem("s3", **{**options, "config_kwargs": config})

    def _get(self, address: SplitResult, lo: int, hi: int) -> memoryview:
        connection = self._connection(address)
        try:
            connection.request("GET", f"{address.path}?{address.query}", headers={"Range": f"bytes={lo}-{hi - 1}"})
            answer = connection.getresponse()
            place = answer.headers.get("content-range", "")
            if answer.status != http.client.PARTIAL_CONTENT or answer.length is None or f"bytes {lo}-" not in place:
                raise http.client.HTTPException(f"{answer.status} {answer.reason} {place}")
            content = memoryview(pa.allocate_buffer(answer.length)).cast("B")
            at = 0
            while at < len(content):
                if not (size := answer.readinto(content[at:])):
                    raise http.client.IncompleteRead(b"", len(content) - at)
                at += size
        except BaseException:
            connection.close()
            raise
        return content

    def _connection(self, address: SplitResult) -> http.client.HTTPConnection:
        """Return this thread's connection, reopened if the other side has closed it."""
        kept: dict[str, http.client.HTTPConnection] = self._of_thread.__dict__
        if address.netloc not in kept:
            host = address.hostname or ""
            if address.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
                raise http.client.HTTPException("a proxy is set, which only fsspec uses")
            kept[address.netloc] = (
                http.client.HTTPSConnection(address.netloc, timeout=TIMEOUT_S, context=self._tls)
                if address.scheme == "https"
                else http.client.HTTPConnection(address.netloc, timeout=TIMEOUT_S)
            )
        connection = kept[address.netloc]
        if connection.sock is not None:
            poll = select.poll()
            poll.register(connection.sock, select.POLLIN)
            if poll.poll(0):  # no request is pending, so this is its end
                connection.close()
        return connection

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE"))
