"""Docstrings of installed libraries as a dataset, read with `ast`, without imports or downloads; labels are libraries.

The libraries are this trainer's own dependencies. Their shares follow a long tail; each sample has real metadata:
measures of the text and of the documented code.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import sysconfig
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from elastic_train.data.corpora.origin import Sample, measure
from elastic_train.data.dataset.schemas import LONG_TAIL
from elastic_train.errors import DataError
from elastic_train.system.progress_bar import Track, silent

# Folder in site-packages -> distribution, the largest share first.
LIBRARIES = {
    "torch": "torch",
    "sympy": "sympy",
    "mlflow": "mlflow",
    "scipy": "scipy",
    "pandas": "pandas",
    "sqlalchemy": "sqlalchemy",
    "matplotlib": "matplotlib",
    "sklearn": "scikit_learn",
    "numpy": "numpy",
    "networkx": "networkx",
    "joblib": "joblib",
}
MIN_CHARS = 20
NUM_PROCESSES = 2
_SKIPPED = frozenset({"tests", "test", "testing", "_vendor", "externals", "__pycache__"})

# Statements that contain other statements.
_HOLDERS = (
    *(ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.If, ast.For, ast.While, ast.With, ast.Try, ast.ExceptHandler),
)

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def site_packages() -> Path:
    """Return the running interpreter's folder of installed libraries."""
    return Path(sysconfig.get_paths()["purelib"])


def versions(folder: Path) -> dict[str, str]:
    """Return the version of each library installed in `folder`, '' without metadata."""
    found = {}
    for library, distribution in LIBRARIES.items():
        if (folder / library).is_dir():
            names = sorted(path.name for path in folder.glob(f"{distribution}-*.dist-info"))
            found[library] = names[0].removeprefix(f"{distribution}-").removesuffix(".dist-info") if names else ""
    return found


def read_docstrings(folder: Path, num_samples: int, seed: int, *, track: Track = silent) -> list[Sample]:
    """Return about `num_samples` docstrings of the libraries in `folder`, in long-tailed shares.

    A library with too few gives all of them. Selection and order depend on the seed and the texts only. Raise DataError
    if fewer than two libraries are installed.
    """
    libraries = list(versions(folder))
    if len(libraries) < 2:
        raise DataError(
            f"{folder}: has {len(libraries)} of the libraries {', '.join(LIBRARIES)}; at least 2 are needed"
        )
    files = [(library, path) for library in libraries for path in _python_files(folder / library)]
    by_library: dict[str, dict[bytes, Sample]] = defaultdict(dict)
    seen: set[bytes] = set()
    for sample in _read_all(folder, files, track):
        key = hashlib.sha256(f"{seed}\n{sample.text}".encode(errors="replace")).digest()
        if key not in seen:
            seen.add(key)
            by_library[sample.label][key] = sample
    chosen: list[Sample] = []
    for library, share in zip(LIBRARIES, LONG_TAIL, strict=True):
        samples = by_library.get(library, {})
        chosen.extend(samples[key] for key in sorted(samples)[: max(1, round(num_samples * share))])
    return chosen


def _python_files(folder: Path) -> list[Path]:
    paths = folder.rglob("*.py")
    return sorted(path for path in paths if not _SKIPPED.intersection(path.relative_to(folder).parts))


def _read_all(folder: Path, files: Sequence[tuple[str, Path]], track: Track) -> Iterator[Sample]:
    """Parse files in worker processes; samples come in file order.

    Workers run without garbage collection: syntax trees have no cycles, and collecting costs as much as parsing.
    """
    size = 96
    chunks = [files[first : first + size] for first in range(0, len(files), size)]
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn"), initializer=gc.disable) as pool:
        parsed = pool.map(_read_files, [folder] * len(chunks), chunks)
        for samples in track(parsed, "reading source files", len(chunks), "hundreds of files"):
            yield from samples


def _read_files(folder: Path, files: Sequence[tuple[str, Path]]) -> list[Sample]:
    return [sample for library, path in files for sample in read_file(library, path, path.relative_to(folder))]


def read_file(library: str, path: Path, relative: Path) -> list[Sample]:
    """Return the docstrings of one source file; none if this interpreter cannot parse it."""
    source = path.read_bytes()
    if b'"""' not in source and b"'''" not in source:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in other people's string literals
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            return []
    area = relative.parts[1] if len(relative.parts) > 2 else "(top)"
    return [
        _sample(library, text, node, depth, in_class, area, relative.stem, len(source))
        for node, text, depth, in_class in _documented(tree)
    ]


def _documented(tree: ast.Module) -> Iterator[tuple[Documented, str, int, bool]]:
    """Yield every documented definition with its text, nesting depth, and whether it is in a class."""
    stack: list[tuple[ast.AST, int, bool]] = [(tree, 0, False)]
    while stack:
        node, depth, in_class = stack.pop()
        if not isinstance(node, _HOLDERS):
            continue
        is_definition = isinstance(node, Documented)
        if isinstance(node, Documented):
            text = ast.get_docstring(node)
            if text is not None and len(text) >= MIN_CHARS:
                yield node, text, depth, in_class
        inner_depth = depth + is_definition
        inner_class = isinstance(node, ast.ClassDef) if is_definition else in_class
        for name in ("finalbody", "orelse", "handlers", "body"):  # the last one is popped first
            children: list[ast.AST] = getattr(node, name, [])
            stack.extend((child, inner_depth, inner_class) for child in reversed(children))


def _sample(
    library: str, text: str, node: Documented, depth: int, in_class: bool, area: str, stem: str, source_bytes: int
) -> Sample:
    name = stem if isinstance(node, ast.Module) else node.name
    is_private = name.startswith("_") and not name.startswith("__")
    return Sample(
        text,
        library,
        (*measure(text), float(depth), _num_arguments(node), float(source_bytes)),
        (_kind(node, in_class), "private" if is_private else "public", area, section_style(text)),
    )


def _num_arguments(node: Documented) -> float | None:
    """Return the number of a function's parameters; None for a class or module."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    arguments = node.args
    variadic = (arguments.vararg is not None) + (arguments.kwarg is not None)
    return float(len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) + variadic)


def _kind(node: Documented, in_class: bool) -> str:
    if isinstance(node, ast.Module):
        return "module"
    if isinstance(node, ast.ClassDef):
        return "class"
    return "method" if in_class else "function"


def section_style(text: str) -> str:
    """Return the section convention of a docstring."""
    if "\n----" in text:
        return "numpy"
    if ":param" in text or ":return" in text:
        return "sphinx"
    if any(f"{word}:\n" in text for word in ("Args", "Arguments", "Returns", "Raises", "Example", "Examples")):
        return "google"
    return "sympy" if "\n====" in text else "plain"
