"""Check a worker's machine before it becomes a member, in parallel to its other preparations.

So a running world never includes a machine that computes or stores wrong bits. Only proven faults count: slow, full or
unreachable parts are reported, and the worker joins.

Data written and synced in a job's folders must be read back unchanged.

Only changed bytes, and errors of a local device, make a node unfit: a full disk, a read-only folder or a server that is
away is reported, and training copes with it (such a node writes no part of commits).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from elastic_train.config.schema import Config
from elastic_train.errors import UnfitError
from elastic_train.health.clock import examine_clock
from elastic_train.health.examinations import examine_memory, examine_products, or_its_error, own_cores, room
from elastic_train.health.links import examine_links
from elastic_train.health.result import Finding, Planned, examine_all, fail, ok, warn
from elastic_train.system.file_systems import mount_of
from elastic_train.system.wording import size
from rendezvous.context import LiveContext, live_context
from rendezvous.etcd.options import etcd_options
from rendezvous.waiting import GivenUp, begin

LIMIT_S, LINK_S, DISK_S, CLOCK_S = 10.0, 30.0, 3.0, 1.0
"""Seconds to wait for products and memory, links, disk, and clock."""
PRODUCTS_S, FILLING_S = 0.1, 0.3

log = logging.getLogger(__name__)


class Proof:
    """The check of a machine, on other threads; `demand` waits for its result."""

    def __init__(self, planned: Mapping[str, Planned]) -> None:
        self._call = begin("health", lambda: _unfit(examine_all(planned)))

    def demand(self, is_stopped: Callable[[], bool]) -> None:
        """Return once this node is known to be fit, or `is_stopped`; raise UnfitError if it is unfit."""
        with contextlib.suppress(GivenUp):
            if unfit := self._call.result_unless(is_stopped):
                raise UnfitError(
                    f"node {socket.gethostname()} fails its health check and does not join; the others continue "
                    f"without it: {unfit}. run.health_check: false skips the check"
                )


def _unfit(findings: Sequence[Finding]) -> str:
    """Return what makes this node unfit, "" if nothing does; log all other problems."""
    for finding in findings:
        if finding.level == "warn":
            log.warning("health check: %s: %s; %s", finding.check, finding.found, finding.remedy)
        elif finding.check == "link" and finding.level == "ok":
            sys.stderr.write(f"health check: link: {finding.found}\n")
    return tell_mates("; ".join(f"{one.found} ({one.remedy})" for one in findings if one.level == "fail"))


def begin_proof(config: Config, device: torch.device) -> Proof | None:
    """Start to check this machine if it joins a live job; return None otherwise.

    A process that trains alone harms no other, and in `restart` mode it is in the world when it starts.
    """
    launched = live_context()
    if launched is None or not config.run.checks_health:
        return None
    return Proof(planned(config, device, launched))


def planned(config: Config, device: torch.device, launched: LiveContext) -> dict[str, Planned]:
    """Return this worker's checks, with their time limits."""
    return dict(_planned(config, device, launched))


def _planned(config: Config, device: torch.device, launched: LiveContext) -> Iterator[tuple[str, Planned]]:
    """Yield this worker's checks: its device, its share of cores and memory; the first worker also checks the rest."""
    rank, number = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    busy = "is another program loading this machine?"
    dtypes = tuple(dict.fromkeys((torch.float32, torch.float64, getattr(torch, config.compute_type))))
    products = partial(examine_products, device, dtypes, own_cores(rank, number), PRODUCTS_S)
    yield "products", Planned(partial(or_its_error, device, "products", products), busy, LIMIT_S, late="warn")

    def memory() -> Iterator[Finding]:
        yield from examine_memory(device, room(device, number), FILLING_S)

    yield "memory", Planned(partial(or_its_error, device, "memory", memory), busy, LIMIT_S, late="warn")
    if rank == 0:
        places = [config.run.dir, config.checkpoint.near_dir]
        places.append(tempfile.gettempdir() if "://" in config.checkpoint_url else config.checkpoint_url)
        folders = partial(examine_folders, [place for place in places if place is not None])
        yield "disk", Planned(folders, "is the storage away? docs/storage.md", DISK_S, late="warn")
        clock = partial(examine_clock, etcd_options(launched.endpoints, launched.options))
        links = partial(examine_links, launched, config.run.min_link_mb_per_s)
        yield "link", Planned(links, "do the nodes that train answer?", LINK_S, late="warn")
        yield "clock", Planned(clock, "etcd did not say what time it is", CLOCK_S, late="warn")


WITHIN_S = 10.0
"""Seconds to wait for the other workers; a killed or stopped one is the agent's to judge."""
_FIT = "fit"


def tell_mates(unfit: str) -> str:
    """Report this worker's problem to the node's other workers, "" if it is fit.

    A fit worker waits for the others; return the node's problem, "" if there is none.

    Otherwise a node with one broken device would join with its other workers, and cost two regroups: one to admit
    it, one when its agent ends it. Workers tell each other through their agent's store.
    """
    rank, number = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if number == 1:
        return unfit
    try:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=WITHIN_S))
        store.set(_key(rank), unfit or _FIT)
        if unfit:
            return unfit
        others = [_key(one) for one in range(number) if one != rank]
        store.wait(others)
        said = [store.get(key).decode() for key in others]
    except (DistError, KeyError, ValueError):
        return unfit
    return next((text for text in said if text != _FIT), "")


def _key(local_rank: int) -> str:
    return f"health/{local_rank}"


NUM_BYTES = 2 << 20
BROKEN = frozenset({errno.EIO, errno.ENXIO, errno.ENODEV, errno.EUCLEAN, errno.EBADMSG})
"""Errors of a failing device, or of damaged data."""


def anonymous_file(folder: Path) -> IO[bytes]:
    """Open an invisible file in a folder, which disappears with its last descriptor."""
    return tempfile.TemporaryFile(dir=folder)


def examine_folders(
    folders: Iterable[str], anonymous: Callable[[Path], IO[bytes]] = anonymous_file
) -> Iterator[Finding]:
    """Yield for each folder whether it keeps what is written; a missing folder's nearest parent is checked."""
    examined = set[Path]()
    for one in folders:
        folder = Path(one)
        try:
            folder = _existing(folder)
            if folder not in examined:
                examined.add(folder)
                yield _examined(folder, anonymous)
        except OSError as error:
            found = f"{folder}: a file of {size(NUM_BYTES)} cannot be written and read: {error.strerror or error}"
            mount = mount_of(folder)
            if error.errno in BROKEN and mount is not None and mount.is_local:
                yield fail("disk", found, "replace the disk, or name a folder on another one")
            else:
                yield warn("disk", found, "make room, and let this user write there: docs/storage.md")


def _existing(folder: Path) -> Path:
    folder = folder.expanduser().absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _examined(folder: Path, anonymous: Callable[[Path], IO[bytes]]) -> Finding:
    written = os.urandom(NUM_BYTES)
    with anonymous(folder) as file:
        file.write(written)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the device is read, not the cache
        file.seek(0)
        read = file.read()
    if read == written:
        return ok("disk", f"{folder} keeps what is written")
    same = next((i for i, (one, other) in enumerate(zip(written, read, strict=False)) if one != other), len(read))
    found = f"{folder} gives other bytes than were written: of {NUM_BYTES}, {len(read)} come back, right up to {same}"
    return fail("disk", found, "replace the disk, or name a folder on another one")
