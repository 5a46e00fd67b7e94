"""Faults of storage: a full or frozen disk, damaged commit files, damaged training data."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from chaos.judge.evidence.run_files import record_files
from chaos.real.acts.effects import HeldWrite, differs, refuses
from chaos.real.acts.job_view import JobView, Struck, targets

if TYPE_CHECKING:
    from chaos.scenario.schedule import Due


def bad_row_group(job: JobView, fault: Due) -> Struck | None:
    """Damage a row group of the run's own training set under the job."""
    assert job.around.data is not None, "the scenario has it, since the kind needs it"
    damage = job.around.data.spoil(job.draws)
    if damage is None:
        return None
    path, group = job.around.data.folder / str(damage["file"]), int(str(damage["row_group"]))
    return Struck([], recorded=damage, effect=lambda: _unreadable(path, group))


def data_outage(job: JobView, fault: Due) -> Struck | None:
    """Take the run's own training set away, as a mount that is lost."""
    assert job.around.data is not None, "the scenario has it, since the kind needs it"
    folder = job.around.data.folder
    away = folder.with_name(f"{folder.name}.away")
    if away.exists():
        return None
    folder.rename(away)

    def come_back() -> list[int]:
        away.rename(folder)
        return []

    return Struck([], undo=come_back, effect=lambda: None if folder.exists() else f"{folder.name} is not there")


def flip_data(job: JobView, fault: Due) -> Struck | None:
    """Flip bits of a row group of the run's own training set under the job."""
    data = job.around.data
    assert data is not None, "the scenario has it, since the kind needs it"
    before = {path: path.read_bytes() for path in data.folder.glob("**/*.parquet")}
    damage = data.flip(job.draws)
    if damage is None:
        return None
    path, group = data.folder / str(damage["file"]), int(str(damage["row_group"]))
    return Struck([], recorded=damage, effect=lambda: _otherwise(path, group, before[path]))


def _otherwise(path: Path, group: int, before: bytes) -> str | None:
    """Return a proof that a row group has changed, and whether a plain reader notices."""
    was = pq.ParquetFile(pa.BufferReader(before)).read_row_group(group)
    try:
        reads = "reads with other values" if not pq.ParquetFile(path).read_row_group(group).equals(was) else None
    except (OSError, pa.ArrowException) as error:
        reads = f"cannot be decoded: {str(error)[:80]}"
    if reads is None and path.read_bytes() == before:
        return None
    return f"row group {group} of {path.name} {reads or 'differs'}"


def _unreadable(path: Path, group: int) -> str | None:
    """Return a proof that reading the row group fails."""
    try:
        pq.ParquetFile(path).read_row_group(group)
    except (OSError, pa.ArrowException) as error:
        return f"row group {group} of {path.name} cannot be read: {str(error)[:80]}"
    return None


_BALLAST = "ballast"
_CHUNK = bytes(1 << 16)
_FROZEN_S, _OPEN_S = 0.4, 0.1
"""A slow disk accepts writes for a fifth of the time."""
_LET_GO_S = 5.0
"""Seconds for a write to end after a thaw, on a busy machine."""


def storage_full(job: JobView, fault: Due) -> Struck | None:
    """Fill the small file system that holds the checkpoints."""
    assert job.around.disk is not None, "the scenario's kinds have asked for it"
    ballast = job.around.disk / _BALLAST
    if ballast.exists() or _is_frozen(job):
        return None
    try:
        with ballast.open("wb", buffering=0) as file:
            while file.write(_CHUNK):
                pass
    except OSError:
        pass  # full

    def empty() -> list[int] | None:
        if _is_frozen(job):
            return None
        ballast.unlink()
        return []

    def look() -> str | None:
        return None if _is_frozen(job) else refuses(ballast.parent, errno.ENOSPC)

    return Struck([], recorded={"bytes": ballast.stat().st_size}, undo=empty, effect=look)


def readonly_dir(job: JobView, fault: Due) -> Struck | None:
    """Make nodes' mounts of the commits read-only."""
    ways = {node.number: job.around.ways[node.number] for node in targets(job, fault)}
    if not ways or any(way.is_readonly for way in ways.values()):
        return None
    for way in ways.values():
        way.set_readonly(is_readonly=True)

    def mend() -> list[int]:
        for way in ways.values():
            way.set_readonly(is_readonly=False)
        return []

    nodes = [job.nodes[number] for number in ways]

    def look() -> str | None:
        """Write as each node would, through its mounts."""
        seen = [refuses(_as_seen_by(node.agent, ways[node.number].folder), errno.EROFS) for node in nodes]
        return seen[0] if all(seen) else None

    return Struck([pid for node in nodes for pid in node.pids()], nodes, undo=mend, effect=look)


def _as_seen_by(pid: int | None, folder: Path) -> Path:
    """Return a folder as seen through a process's mounts."""
    return Path(f"/proc/{pid}/root") / folder.absolute().relative_to("/")


def freeze_fs(job: JobView, fault: Due) -> Struck | None:
    """Freeze the file systems of commit files and metrics: writers block, and cannot even be killed."""
    writes = _held_writes(job)
    if writes is None:
        return None
    for disk in job.around.freezing:
        disk.freeze()
    for write in writes:
        write.begin()
    thawed: list[float] = []

    def thaw() -> list[int]:
        thawed.append(time.monotonic())
        return _let_go(job, writes)

    def look() -> str | None:
        seen = [write.ended_after(thawed[0]) for write in writes] if thawed else []
        return seen[0] if seen and all(seen) else None

    return Struck([], undo=thaw, effect=look)


def slow_disk(job: JobView, fault: Due) -> Struck | None:
    """Make the file systems of commit files and metrics accept writes only now and then."""
    writes = _held_writes(job)
    if writes is None:
        return None
    for disk in job.around.freezing:
        disk.stutter(_FROZEN_S, _OPEN_S)
    frozen_at = time.monotonic()
    for write in writes:
        write.begin()

    def look() -> str | None:
        """Return a proof that each write ended, but not before the disk was first open, or nearly so."""
        seen = [write.ended_after(frozen_at + _FROZEN_S / 2) for write in writes]
        return seen[0] if seen and all(seen) else None

    return Struck([], undo=lambda: _let_go(job, writes), effect=look)


def _held_writes(job: JobView) -> list[HeldWrite] | None:
    """Return a write for each file system; None while it is frozen, or full, so that it accepts none anyway."""
    if _is_frozen(job):
        return None
    try:
        return [HeldWrite(disk.folder) for disk in job.around.freezing]
    except OSError:
        return None


def _let_go(job: JobView, writes: Sequence[HeldWrite]) -> list[int]:
    for disk in job.around.freezing:
        disk.thaw()
    for write in writes:
        write.join(_LET_GO_S)
    return []


def _is_frozen(job: JobView) -> bool:
    """Return True if this process's own writes to the commit files, and so all faults, would block."""
    return any(disk.is_frozen for disk in job.around.freezing)


def flip_bit(job: JobView, fault: Due) -> Struck | None:
    def flip(path: Path) -> None:
        place = job.draws.randrange(path.stat().st_size)
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0] ^ 1 << job.draws.randrange(8)
            file.seek(place)
            file.write(bytes([byte]))

    return _damage(job, flip)


def truncate_file(job: JobView, fault: Due) -> Struck | None:
    def cut(path: Path) -> None:
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(job.draws.randrange(size))

    return _damage(job, cut)


def delete_file(job: JobView, fault: Due) -> Struck | None:
    return _damage(job, Path.unlink)


def _damage(job: JobView, spoil: Callable[[Path], None]) -> Struck | None:
    """Damage a file of the newest intact commit; return None unless an older intact one exists."""
    whole = [path for path in record_files(job.folder) if path.name not in job.damaged]
    if len(whole) < 2 or _is_frozen(job):
        return None
    try:
        record = json.loads(whole[-1].read_bytes())
        files = sorted(name for name, file in record["files"].items() if file["size"] > 0)
        path = job.folder / record["attempt"] / job.draws.choice(files)
        before = path.read_bytes()
        spoil(path)
    except FileNotFoundError:
        return None  # a newer commit replaced this one
    job.damaged.add(whole[-1].name)
    where: dict[str, object] = {"file": str(path.relative_to(job.folder)), "commit": whole[-1].name}
    return Struck([], recorded=where, effect=differs(path, before, whole[-1]))


def spoil_s3(job: JobView, fault: Due) -> Struck | None:
    """Make the S3 server answer wrongly, as the kind says."""
    s3 = job.around.s3
    assert s3 is not None, "the scenario's kinds have asked for it"
    mine = s3.spoil(fault.kind)

    def heal() -> list[int]:
        s3.heal(mine)
        job.on_event(f"{fault.kind}: {s3.spoilt[mine]} requests were spoilt")
        return []

    def look() -> str | None:
        return f"{s3.spoilt[mine]} requests were spoilt" if s3.spoilt[mine] else None

    return Struck([], undo=heal, effect=look)


ON_S3 = ("storage_errors", "storage_conflict", "storage_taken", "storage_slow")
