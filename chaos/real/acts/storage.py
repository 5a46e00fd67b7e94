"""Faults of the storage of checkpoints: a disk that is full or freezes, and files of commits that are damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from chaos.judge.evidence.run_files import record_files
from chaos.real.acts.effects import counted, differs
from chaos.real.acts.job_view import Act, JobView
from chaos.real.acts.outcome import Struck
from chaos.real.acts.targets import targets

if TYPE_CHECKING:
    from chaos.scenario.schedule import Due

_BALLAST = "ballast"
_CHUNK = bytes(1 << 16)


def storage_full(job: JobView, fault: Due) -> Struck | None:
    """Fill the small file system that holds the checkpoints."""
    assert job.around.disk is not None, "the scenario's kinds have asked for it"
    ballast = job.around.disk / _BALLAST
    if ballast.exists():
        return None
    try:
        with ballast.open("wb", buffering=0) as file:
            while file.write(_CHUNK):
                pass
    except OSError:
        pass  # full

    def empty() -> list[int]:
        ballast.unlink()
        return []

    def refuses() -> str | None:
        try:
            (ballast.parent / f"{_BALLAST}.more").write_bytes(_CHUNK)
        except OSError as error:
            return f"writing there fails: {error.strerror}"
        finally:
            (ballast.parent / f"{_BALLAST}.more").unlink(missing_ok=True)
        return None

    return Struck([], recorded={"bytes": ballast.stat().st_size}, undo=empty, effect=refuses)


def readonly_dir(job: JobView, fault: Due) -> Struck | None:
    """Let nodes' own ways to the commits take no writes."""
    ways = {node.number: job.around.ways[node.number] for node in targets(job, fault)}
    if not ways or any(way.is_readonly for way in ways.values()):
        return None
    for way in ways.values():
        way.set_readonly(is_readonly=True)

    def mend() -> list[int]:
        for way in ways.values():
            way.set_readonly(is_readonly=False)
        return []

    def refuses() -> str | None:
        try:
            (next(iter(ways.values())).folder / "probe").touch()
        except OSError as error:
            return f"writing there fails: {error.strerror}"
        return None

    nodes = [job.nodes[number] for number in ways]
    return Struck([pid for node in nodes for pid in node.pids()], nodes, undo=mend, effect=refuses)


def freeze_fs(job: JobView, fault: Due) -> Struck | None:
    """Freeze the file systems of commits' files and metrics: who writes there waits, and cannot even be killed."""
    for disk in job.around.freezing:
        disk.freeze()

    def thaw() -> list[int]:
        for disk in job.around.freezing:
            disk.thaw()
        return []

    def takes_no_writes() -> str | None:
        frozen = [disk.folder.name for disk in job.around.freezing if disk.refuses_to_freeze()]
        return f"{' and '.join(frozen)} are frozen" if len(frozen) == len(job.around.freezing) else None

    return Struck([], undo=thaw, effect=takes_no_writes)


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
    """Spoil a file of the newest commit that is whole; None while there is none, and none before it that is whole."""
    whole = [path for path in record_files(job.folder) if path.name not in job.damaged]
    if len(whole) < 2:
        return None
    try:
        record = json.loads(whole[-1].read_bytes())
        files = sorted(name for name, file in record["files"].items() if file["size"] > 0)
        path = job.folder / record["attempt"] / job.draws.choice(files)
        before = path.read_bytes()
        spoil(path)
    except FileNotFoundError:
        return None  # a newer commit has come, and this one went
    job.damaged.add(whole[-1].name)
    where: dict[str, object] = {"file": str(path.relative_to(job.folder)), "commit": whole[-1].name}
    return Struck([], recorded=where, effect=differs(path, before))


def spoil_s3(job: JobView, fault: Due) -> Struck | None:
    """Let the S3 answer wrongly, as the kind says."""
    s3 = job.around.s3
    assert s3 is not None, "the scenario's kinds have asked for it"
    before, spoilt = s3.num_spoilt, counted("requests were spoilt", lambda: s3.num_spoilt)
    mine = s3.spoil(fault.kind)

    def heal() -> list[int]:
        s3.heal(mine)
        job.on_event(f"{fault.kind}: {s3.num_spoilt - before} requests were spoilt")
        return []

    return Struck([], undo=heal, effect=spoilt)


ON_S3 = ("storage_errors", "storage_conflict", "storage_taken", "storage_slow")
ACTS: dict[str, Act] = {
    **{act.__name__: act for act in (storage_full, readonly_dir, freeze_fs, flip_bit, truncate_file, delete_file)},
    **dict.fromkeys(ON_S3, spoil_s3),
}
