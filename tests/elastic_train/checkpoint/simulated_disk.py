"""An in-memory disk that loses unsynced data in every way in which a file system may.

POSIX orders only what a sync orders. So after a crash a name holds what its directory's last sync made durable, or any
later value, independently for every name. Bytes written since their file's last sync are there, or zeros, or beyond the
end, independently for each half of a write. A name below a missing directory is gone.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from elastic_train.checkpoint.stores.disk import Disk, RealDisk

_MOST_LOST_WRITES = 3  # the states grow by a factor of four with every write
Image = dict[str, bytes]
Operation = Callable[[], AbstractContextManager[None]]


@dataclass(eq=False)
class Inode:
    """A file's bytes: the durable ones, and the writes after them."""

    durable: bytes = b""
    written: list[bytes] = field(default_factory=list)

    def fates(self) -> Iterator[bytes]:
        """Yield every content that a crash may leave."""
        assert len(self.written) <= _MOST_LOST_WRITES, "too many writes without a sync to try every fate"
        halves = [
            half for piece in self.written for half in (piece[: len(piece) // 2], piece[len(piece) // 2 :]) if half
        ]
        for num_kept in range(len(halves) + 1):
            for landed in itertools.product((True, False), repeat=num_kept):
                parts = [half if is_there else bytes(len(half)) for half, is_there in zip(halves, landed, strict=False)]
                yield self.durable + b"".join(parts)


DIRECTORY = "a directory"
Holds = Inode | str | None
"""The target of a name: a file, DIRECTORY, or nothing."""


class SimulatedFile(io.RawIOBase):
    """An open file of a simulated disk."""

    def __init__(self, inode: Inode) -> None:
        self.inode = inode

    def writable(self) -> bool:
        return True

    def write(self, content: object, /) -> int:
        piece = bytes(content)  # type: ignore[call-overload]  # any buffer
        self.inode.written.append(piece)
        return len(piece)


class SimulatedDisk:
    """A `Disk` below `root`, which exists and is durable."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names: dict[Path, Holds] = {root: DIRECTORY}
        self._since: dict[Path, list[Holds]] = {}  # per name: possible values after a crash, the durable one first

    def create(self, path: Path) -> BinaryIO:
        inode = Inode()
        self._name(path, inode)
        return SimulatedFile(inode)  # type: ignore[return-value]

    def sync(self, files: Sequence[BinaryIO], directories: Sequence[Path]) -> None:
        """Sync all in one step: a sync only removes states, so intermediate states are among the earlier ones."""
        for file in files:
            assert isinstance(file, SimulatedFile)
            inode = file.inode
            inode.durable, inode.written = inode.durable + b"".join(inode.written), []
        for name in [name for name in self._since if name.parent in directories]:
            self._since[name] = [self._names.get(name)]

    def link(self, source: Path, target: Path) -> None:
        self._name(target, self._held_by(source))

    def unlink(self, path: Path) -> None:
        self._held_by(path)
        self._set(path, None)

    def make_directory(self, path: Path) -> None:
        self._name(path, DIRECTORY)

    def content(self, path: Path) -> bytes:
        """Return a file's bytes as a program sees them."""
        inode = self._held_by(path)
        assert isinstance(inode, Inode)
        return inode.durable + b"".join(inode.written)

    def images(self) -> Iterator[Image]:
        """Yield every state in which a crash may leave the files now, by their names below the root."""
        choices = {name: list(dict.fromkeys(held)) for name, held in self._since.items()}
        for chosen in itertools.product(*choices.values()):
            names: dict[Path, Holds] = {self._root: DIRECTORY, **dict(zip(choices, chosen, strict=True))}
            files = {
                name: inode
                for name, inode in names.items()
                if isinstance(inode, Inode)
                and all(names.get(above) == DIRECTORY for above in name.parents if above.is_relative_to(self._root))
            }
            fates = {inode: list(inode.fates()) for inode in files.values()}
            for contents in itertools.product(*fates.values()):
                left = dict(zip(fates, contents, strict=True))
                yield {name.relative_to(self._root).as_posix(): left[inode] for name, inode in files.items()}

    def _held_by(self, path: Path) -> Holds:
        held = self._names.get(path)
        if held is None:
            raise FileNotFoundError(path)
        return held

    def _name(self, path: Path, held: Holds) -> None:
        if self._held_by(path.parent) != DIRECTORY:
            raise NotADirectoryError(path.parent)
        if self._names.get(path) is not None:
            raise FileExistsError(path)
        self._set(path, held)

    def _set(self, path: Path, held: Holds) -> None:
        self._names[path] = held
        self._since.setdefault(path, [None]).append(held)


class MirroredDisk(RealDisk):
    """A real disk that repeats every operation on a simulated one, both inside an `operation` of the caller's."""

    def __init__(self, simulated: Disk, operation: Operation) -> None:
        super().__init__()
        self._simulated = simulated
        self._operation = operation

    def create(self, path: Path) -> BinaryIO:
        with self._operation():
            return MirroredFile(super().create(path), self._simulated.create(path), self._operation)  # type: ignore[return-value]

    def sync(self, files: Sequence[BinaryIO], directories: Sequence[Path]) -> None:
        """Sync nothing on the real disk: only the simulated one loses data."""
        with self._operation():
            self._simulated.sync([file.simulated for file in files if isinstance(file, MirroredFile)], directories)

    def link(self, source: Path, target: Path) -> None:
        with self._operation():
            super().link(source, target)
            self._simulated.link(source, target)

    def unlink(self, path: Path) -> None:
        with self._operation():
            super().unlink(path)
            self._simulated.unlink(path)

    def make_directory(self, path: Path) -> None:
        with self._operation():
            super().make_directory(path)
            with contextlib.suppress(FileExistsError):  # a store removes empty folders past its disk; here they stay
                self._simulated.make_directory(path)


class MirroredFile:
    """A file that is written on both disks."""

    def __init__(self, real: BinaryIO, simulated: BinaryIO, operation: Operation) -> None:
        self._real = real
        self._operation = operation
        self.simulated = simulated

    def __enter__(self) -> MirroredFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._real.close()

    def write(self, content: bytes) -> int:
        with self._operation():
            self.simulated.write(content)
            return self._real.write(content)
