"""Read ranges of S3 objects by plain HTTP: fsspec signs an object's address, and every range is a bare GET.

A client that signs, parses and checks each request in Python costs more than decoding the result; this one reads a body
straight into Arrow's memory, in the calling thread, over that thread's own connection. Credentials, endpoint and
addressing are fsspec's. Any failure returns None, and fsspec is asked, which retries and knows the errors. Where this
does not work at all (behind a proxy, with another way of signing) it is suspended for a while.
"""

from __future__ import annotations

import http.client
import logging
import os
import select
import ssl
import threading
import time
import urllib.request
from functools import cached_property
from urllib.parse import SplitResult, urlsplit

import fsspec
import pyarrow as pa

SIGNED_FOR_S, SIGN_AGAIN_AFTER_S = 3600, 600
TIMEOUT_S = 15.0
MOST_FAILURES = 32
"""Consecutive failures, without one successful range, after which signed addresses are suspended."""

_LOG = logging.getLogger(__name__)


class SignedRanges:
    """Reads ranges of objects of an S3 file system; thread-safe."""

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
        """Return an object's signed address."""
        address, signed_s = self._addresses.get(path, (None, 0.0))
        if address is None or time.monotonic() - signed_s > SIGN_AGAIN_AFTER_S:
            address = urlsplit(self._signer.sign(path, expiration=SIGNED_FOR_S))
            self._addresses[path] = address, time.monotonic()
        return address

    @cached_property
    def _signer(self) -> fsspec.AbstractFileSystem:
        """The same file system with version 4 signatures; in some regions boto's default is refused by newer
        buckets."""
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
