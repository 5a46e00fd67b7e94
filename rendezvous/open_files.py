"""The limit of open files, for connections between all ranks and to the store; and missing standard streams.

A process started without standard streams (`>&-`) gets null devices for them.
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
"""Connections per other rank, and other open files of a process."""
MOST = 1 << 20
"""Linux's default maximum per process."""

_log = logging.getLogger("rendezvous")


def raise_limit() -> int:
    """Raise this process's soft limit of open files, 1024 on many machines, to its hard limit; return the new limit."""
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
    """Raise the limit of open files, and warn once if it is too low for a world of `num_ranks`."""
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
    """A stream that discards its output once its reader, or its terminal, is gone."""

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
    """Open missing standard streams, because otherwise a socket could get their number, and be printed to.

    With `outlive_readers`, output may lose its reader: prints of a task must not end a run, e.g. under `| head`.
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
    """Return a surviving stream of the same kind; streams that are not the process's own, as in tests, stay."""
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
