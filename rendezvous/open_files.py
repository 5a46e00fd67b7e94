"""How many files a process may open: each rank has a connection to every other one, and one has the store's, too.

And the three that every process has: one that was started without them (`>&-`) gets ones that take and give nothing.
"""

from __future__ import annotations

import functools
import logging
import os
import resource
import sys

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


def fill_standard_streams() -> None:
    """Open what this process lacks of its standard streams, or a socket would become one, and be printed to."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - they stay open
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
