"""Digest a task's source: its modules, and their imports from its own package or folder.

Imports are read from the files, including those inside functions, not from the modules that a process has loaded: a
process that has trained for a while has loaded more than a new one. Installed packages count by version only, unless
the task itself is in one; so does this package, except its tasks. Imports from elsewhere on the path, or by a computed
name, are not seen.

Nodes that train together compare these digests. The tasks of an installed release do not count there: releases of a
series compute the same bits, though a message may read differently. Those of a source checkout count, as any file may.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_FILES = 256
"""Most files that are read; a larger task is compared by those found first."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_NOT_OURS = frozenset({"torch", "builtins", *sys.stdlib_module_names})
_COMMENT = re.compile(r"#.*")
_IMPORT = re.compile(
    r"(?:^|[;:])[ \t]*(?:from[ \t]+(\.*)[ \t]*([\w.]*)[ \t]+import\b[ \t]*(\([^)]*\)|(?:\\\n|[^\n;])*)"
    r"|import[ \t]+((?:\\\n|[^\n;])*))",
    re.MULTILINE,
)
"""Matches any form of import, far faster than Python's parser. A false match in a string only costs a look for a
file."""
_NAME = re.compile(r"(?:^|[,(])[\s\\]*([\w.]+)")
_PACKAGE, _TASKS = "elastic_train", "elastic_train.tasks"


@functools.cache
def source_of(kind: Any) -> tuple[str, ...]:
    """Return names and digests of the modules of a class, its bases, and their imports; one line each.

    For a function, only its own module counts.
    """
    files = source_files(kind)
    return tuple(f"{name} {hashlib.sha256(files[name].read_bytes()).hexdigest()[:12]}" for name in sorted(files))


def compared(lines: Iterable[str]) -> list[str]:
    """Return those lines of `source_of` that must be equal on all nodes."""
    is_release = bool(_INSTALLED & set(Path(__file__).parts))
    return [line for line in lines if not (is_release and line.startswith(f"{_PACKAGE}."))]


def task_imports(path: str, package: str) -> bool:
    """Return True if the module of a task's path (`module:name`), or a neighbour that it imports, imports a package.

    No user code is imported for it. Imports of this package's own tasks do not count.
    """
    name = path.partition(":")[0]
    folders = (Path(entry).absolute() for entry in sys.path)
    file = next((file for folder in folders if (file := _Home(folder, "").file_of(name)) is not None), None)
    own = {} if file is None else _files_of([(name, file)])
    return any(
        imported.partition(".")[0] == package
        for module, its_file in own.items()
        if module.partition(".")[0] != _PACKAGE
        for imported in _imports(module, its_file)
    )


def source_files(kind: Any) -> dict[str, Path]:
    """Return the files by module name; at most MOST_FILES."""
    return _files_of(_own_modules(kind))


def _files_of(modules: Iterable[tuple[str, Path]]) -> dict[str, Path]:
    """Return the files of modules, and of their imports from their own package or folder."""
    found: dict[str, Path] = {}
    looked_for: set[tuple[_Home, str]] = set()
    waiting = deque((name, file, _home(name, file)) for name, file in modules)
    while waiting and len(found) < MOST_FILES:
        name, file, home = waiting.popleft()
        if name in found:
            continue
        found[name] = file
        for imported in _with_parents(_imports(name, file)):
            if (home, imported) not in looked_for and (its_file := home.file_of(imported)) is not None:
                waiting.append((imported, its_file, home))
            looked_for.add((home, imported))
    return found


@dataclass(frozen=True, slots=True)
class _Home:
    """The folder of a task's package or single file; only modules within `within` count, or all for ""."""

    folder: Path
    within: str

    def file_of(self, name: str) -> Path | None:
        """Return the source file of a module that counts; None for others."""
        top = name.partition(".")[0]
        is_within = not self.within or f"{name}.".startswith(f"{self.within}.")
        if (
            not name
            or top in _NOT_OURS
            or not is_within
            or (top == _PACKAGE and not f"{name}.".startswith(f"{_TASKS}."))
        ):
            return None
        path = self.folder.joinpath(*name.split("."))
        return next(
            (file for file in (path / "__init__.py", path.with_name(f"{path.name}.py")) if file.is_file()), None
        )


def _home(name: str, file: Path) -> _Home:
    depth = name.count(".") + (file.name == "__init__.py")
    folder, top = file.parents[min(depth, len(file.parents) - 1)], name.partition(".")[0]
    if top == _PACKAGE:
        return _Home(folder, _TASKS)
    return _Home(folder, top if _INSTALLED & set(folder.parts) else "")


def _own_modules(kind: Any) -> Iterator[tuple[str, Path]]:
    """Yield the modules of a class and its bases, or of a function, except torch's and Python's."""
    for name in sorted({base.__module__ for base in getattr(kind, "__mro__", (kind,))}):
        file = Path(getattr(sys.modules[name], "__file__", None) or "")
        if (name == "__main__" or name.partition(".")[0] not in _NOT_OURS) and file.is_file():
            yield name, file.absolute()


def _with_parents(names: Iterator[str]) -> Iterator[str]:
    """Yield a module's parent packages before it, as importing it runs them."""
    for name in names:
        parts = name.split(".")
        yield from (".".join(parts[: end + 1]) for end in range(len(parts)))


def _imports(name: str, file: Path) -> Iterator[str]:
    """Yield the module's own name, and its imports: modules, or names in them."""
    yield name
    if file.suffix != ".py":
        return
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for dots, module, names, modules in _IMPORT.findall(_COMMENT.sub("", file.read_text(errors="replace"))):
        above = package[: max(0, len(package) - len(dots) + 1)] if dots else []
        base = [*above, *([module] if module else [])]
        if base:
            yield ".".join(base)
        yield from (".".join([*base, imported]) for imported in _NAME.findall(names))
        yield from _NAME.findall(modules)
