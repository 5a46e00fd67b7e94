"""Detect a path's file system from the kernel's mount table, and its hazards for a job's commits.

`docs/storage.md` says what commits need of a file system, and which ones provide it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
_LOCAL = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs", "tmpfs", "xfs", "zfs"}
)
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
STARTED_IN = "# relative paths are from "
"""Begins the comment in which a run's configuration names the folder that the run was started in."""
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system: mount point, kind ("ext4", "nfs4", "fuse.gcsfuse") and options."""

    point: str
    kind: str
    options: frozenset[str]

    @property
    def is_local(self) -> bool:
        """True if no other node sees what is written there, and the node's own processes see it at once."""
        return self.kind in _LOCAL


def mount_of(path: str | Path, mounts: Path = MOUNTS) -> Mount | None:
    """Return the mount of a path, existing or not; None if unknown."""
    real = os.path.realpath(path)
    try:
        around = [line for line in mounts.read_text().splitlines() if _is_below(real, _point(line))]
        # Of two mounts on one point the later hides the earlier. Containers have hundreds of mounts.
        return _parsed(max(reversed(around), key=lambda line: len(_point(line)))) if around else None
    except (OSError, ValueError, IndexError):
        return None


Location = tuple[int, str, str]
"""A device, its mount point, and the real path of a folder there."""


def location_of(url: str) -> Location | None:
    """Return the location of a folder, existing or not; None for URLs, or if unknown."""
    if "://" in url:
        return None
    real = Path(os.path.realpath(url))
    mount = mount_of(real)
    try:
        nearest = next((path for path in (real, *real.parents) if path.exists()), None)
        return None if nearest is None or mount is None else (nearest.stat().st_dev, mount.point, str(real))
    except OSError:  # its server is away
        return None


def hazards(url: str, mounts: Path = MOUNTS) -> Iterator[str]:
    """Yield the hazards of a folder for a job's commits, one sentence each; nothing for URLs."""
    if "://" in url or (mount := mount_of(url, mounts)) is None:
        return
    on = f"{url} is on {mount.kind} ({mount.point})"
    if mount.kind in _IN_MEMORY:
        yield f"{on}: commits are lost when this machine restarts"
    elif mount.kind == "overlay":
        yield f"{on}, a container's own layer: commits are lost with the container"
    if mount.kind.startswith("nfs"):
        yield from _of_nfs(on, mount.options)
    if mount.kind in ("cifs", "smb3"):
        yield f"{on}: SMB servers differ in what they hold of links and syncs; NFS or an object store is safer"
    if mount.kind.startswith("fuse") and mount.kind != "fuse.lustre":
        yield f"{on}: many FUSE file systems have no hard links, and sync nothing; use the store's URL if it has one"


def _of_nfs(on: str, options: frozenset[str]) -> Iterator[str]:
    if "nocto" in options:
        yield f"{on} with 'nocto': what other nodes write is seen up to a minute late; mount it with 'cto'"
    if "soft" in options or "softerr" in options:
        yield f"{on} with 'soft': a server that is away for a while makes writes fail; mount it 'hard'"
    if "async" in options:
        yield f"{on} with 'async': a save may be reported before the server has it; mount it without"


def _parsed(line: str) -> Mount:
    """Parse a line of mountinfo: ID parent device root POINT OPTIONS [tags...] - KIND source OPTIONS."""
    before, _, after = line.partition(" - ")
    kind, _, more = after.split(" ", 2)
    return Mount(_point(line), kind, frozenset(f"{before.split()[5]},{more}".split(",")))


def _point(line: str) -> str:
    point = line.split(" ", 5)[4]
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), point) if "\\" in point else point


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def absolute(place: str | None) -> str | None:
    """Return a folder with its absolute path, also that of a file:// URL; another URL is one already."""
    if place is None:
        return None
    scheme, separator, path = place.partition("://")
    if separator:
        return f"{scheme}://{Path(path).absolute()}" if scheme in ("file", "local") else place
    return str(Path(place).expanduser().absolute())


def working_folder() -> str | None:
    """Return the working folder; None if it is deleted, or its name does not fit on a line."""
    try:
        folder = str(Path.cwd())
    except FileNotFoundError:
        return None
    return folder if folder.isprintable() else None
