"""Import folders of images: DIR/<label>/<image>, or DIR/train/<label>/<image> with DIR/validation or DIR/val.

Files are shuffled by the seed, so that every row group mixes labels, and keep their bytes. A folder with images and no
folders is a dataset without labels, in the order of the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from elastic_train.data.corpora import origin
from elastic_train.data.dataset.manifest import TRAIN, VALIDATION
from elastic_train.data.dataset.schemas import IMAGE_SUFFIXES
from elastic_train.data.tables.files import Chunk, shown_chunks
from elastic_train.data.tables.images import COLUMN, ImageCheck
from elastic_train.data.tables.importing import Table, Written, contents_of, load_parts, write_table
from elastic_train.data.tables.labels import COLUMN as LABEL
from elastic_train.errors import ConfigError
from elastic_train.system.progress_bar import Track, silent
from elastic_train.system.wording import counted

FILE = pa.field("file", pa.string(), nullable=False)
"""The image's path in the imported folder."""
_VALIDATION_NAMES = ("validation", "valid", "val")
_JUNK = frozenset(("thumbs.db", "desktop.ini"))
"""Files that Windows puts into folders of images; those of macOS are hidden."""
_AT_ONCE = 64
_MOST_NAMED = 50
_WHERE = "put it directly into the folder of its class, or remove it"
_UNLABELLED = (
    "put them into folders of their classes, or all into a folder without folders: imported apart, such images have no "
    "labels, and `elastic-train predict` takes them"
)


def import_images(
    out: Path,
    folder: Path,
    *,
    share: float,
    seed: int,
    replace: bool = False,
    check: ImageCheck | None = None,
    track: Track = silent,
) -> Written:
    """Make a dataset of a folder of images with their bytes; raise ConfigError with all that do not decode."""
    check = check or ImageCheck()
    if loose := _unlabelled(folder):
        files, labels, share = {TRAIN: loose}, list[str](), 0.0
    else:
        files = {name: _files_of(part) for name, part in _parts_of(folder).items()}
        labels = sorted({path.parent.name for paths in files.values() for path in paths})
    for label in labels:
        if not label.isprintable():  # includes names that are not UTF-8
            raise ConfigError(f"{folder}: {label!r} cannot be a class's name: rename the folder")
    if len(labels) == 1:
        raise ConfigError(
            f"{folder}: has images in {counted(len(labels), 'folder')}, and a classifier needs two classes; put the "
            "images of each class in a folder of its name"
        )
    for name, paths in files.items() if labels else ():
        files[name] = [paths[place] for place in np.random.default_rng([seed, len(paths)]).permutation(len(paths))]
    made_from = {
        "source": "images",
        "validation_share": share,
        "seed": seed,
        "content": [[path.parent.name, *found] for each in files.values() for path, found in _digests(each)],
        "pyarrow": pa.__version__,
        **check.choices,
    }
    if origin.is_finished(out, made_from, replace=replace):
        return load_parts(out)
    chunks = {
        name: shown_chunks(_chunks(folder, paths, labels, check), f"decoding {name}", track)
        for name, paths in files.items()
    }
    facts = {"label_column": LABEL.name, "labels": tuple(labels)} if labels else {}
    return write_table(out, Table(chunks, facts, COLUMN.name), made_from, share, seed, unfit=check)


def _parts_of(folder: Path) -> Mapping[str, Path]:
    held_out = next((folder / name for name in _VALIDATION_NAMES if (folder / name).is_dir()), None)
    if not (folder / TRAIN).is_dir():
        return {TRAIN: folder}
    return {TRAIN: folder / TRAIN} | ({VALIDATION: held_out} if held_out else {})


def _unlabelled(folder: Path) -> list[Path]:
    """Return the images directly in a folder that has no folders of classes, in name order."""
    has_folders = any(path.is_dir() and not path.name.startswith(".") for path in folder.iterdir())
    return [] if has_folders else [path for path in sorted(folder.iterdir()) if _is_image(path)]


def _files_of(folder: Path) -> list[Path]:
    """Return the images of a part, in name order.

    Raise ConfigError with other files in image folders, broken links, and images outside a class folder or below one:
    nothing is ignored silently.
    """
    found = sorted(path for path in folder.glob("*/*") if not path.name.startswith(".") and not _is_junk(path))
    files = [path for path in found if path.is_file()]
    wrong = [f"{path}: does not exist: it is a broken link, or no file" for path in found if _is_no_file(path)]
    wrong += [
        f"{path}: is none of {', '.join(IMAGE_SUFFIXES)}; remove it, or convert it"
        for path in files
        if path.suffix.lower() not in IMAGE_SUFFIXES
    ]
    if loose := [path for path in sorted(folder.iterdir()) if _is_image(path)]:
        others = f" and {counted(len(loose) - 1, 'other image')}" if len(loose) > 1 else ""
        wrong.append(f"{loose[0]}{others}: no folder of a class holds them; {_UNLABELLED}")
    for inner in (path for path in found if path.is_dir() and not path.is_symlink()):
        wrong += [f"{path}: is deeper than FOLDER/LABEL/FILE; {_WHERE}" for path in inner.rglob("*") if _is_image(path)]
    if wrong:
        more = len(wrong) - _MOST_NAMED
        raise ConfigError(*wrong[:_MOST_NAMED], *([f"and {more:,} files more"] if more > 0 else []))
    if not files:
        raise ConfigError(
            f"{folder}: holds no images; put those of each class in a folder of its name, such as cat/1.png"
        )
    return files


def _is_junk(path: Path) -> bool:
    return path.name.lower() in _JUNK


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".") and path.is_file()


def _is_no_file(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.is_file() and not path.is_dir()


def _digests(paths: Sequence[Path]) -> Iterator[tuple[Path, list[object]]]:
    yield from zip(paths, contents_of(paths), strict=True)


def _chunks(folder: Path, paths: Sequence[Path], labels: Sequence[str], check: ImageCheck) -> Iterator[Chunk]:
    number_of = {label: number for number, label in enumerate(labels)}
    for first in range(0, len(paths), _AT_ONCE):
        some = paths[first : first + _AT_ONCE]
        images = [path.read_bytes() for path in some]
        are_whole = check.are_whole(images, lambda row, some=some: str(some[row]))  # type: ignore[misc]
        columns = {COLUMN: images, FILE: [str(path.relative_to(folder)) for path in some]}
        if labels:
            columns[LABEL] = [number_of[path.parent.name] for path in some]
        rows = pa.RecordBatch.from_arrays(
            [pa.array(values, each.type) for each, values in columns.items()], schema=pa.schema(list(columns))
        ).filter(pa.array(are_whole, pa.bool_()))
        yield Chunk(some[0], first, rows, (first + len(some)) / len(paths))
