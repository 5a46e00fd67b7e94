"""How many files a process may open: each rank has a connection to every other one, and one has the store's, too.

And the three that every process has: one that was started without them (`>&-`) gets ones that take and give nothing.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import logging
import os
import resource
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PER_RANK, BESIDES = 2, 256
"""Connections for each other rank, and what a process has open besides."""
MOST = 1 << 20
"""Linux's own default for the highest that a process may have."""

_log = logging.getLogger("rendezvous")


def raise_limit() -> int:
    """Raise this process's soft limit of open files, 1024 on many machines, to its hard limit; return what it is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # above what the kernel allows
        return soft
    return wanted


def make_room_for(num_ranks: int) -> None:
    """Raise the limit of open files, and warn once if it is too low for a world of so many ranks."""
    limit, needed = raise_limit(), PER_RANK * num_ranks + BESIDES
    if limit < needed:
        _warn_once(limit, needed, num_ranks)


@functools.cache
def _warn_once(limit: int, needed: int, num_ranks: int) -> None:
    _log.warning(
        "this process may open %d files, and a world of %d ranks needs about %d: raise the hard limit (ulimit -Hn, "
        "LimitNOFILE of a systemd unit, --ulimit nofile of a container)",
        *(limit, num_ranks, needed),
    )


class _Surviving(io.FileIO):
    """A stream that takes and forgets what is written once its reader, or its terminal, is gone."""

    def write(self, content: ReadableBuffer) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self.fileno() == 1:
                with contextlib.suppress(OSError):
                    os.write(2, f"standard output is closed ({error.strerror}); training continues\n".encode())
            return memoryview(content).nbytes


def fill_standard_streams(*, outlive_readers: bool = True) -> None:
    """Open what this process lacks of its standard streams, or a socket would become one, and be printed to.

    With `outlive_readers` output may lose its reader: what a task prints must not end a run, as under `| head`.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
    if outlive_readers:
        sys.stdout, sys.stderr = _surviving(1, sys.stdout), _surviving(2, sys.stderr)


def _surviving(number: int, stream: TextIO | None) -> TextIO:
    """Return a stream of the same kind that survives; one that is not the process's own, as in tests, stays."""
    if stream is not None and not (isinstance(stream, io.TextIOWrapper) and stream.fileno() == number):
        return stream
    raw = _Surviving(number, "w", closefd=False)
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=True)
    stream.flush()
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
