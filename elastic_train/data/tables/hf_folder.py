"""Import folders of Hugging Face datasets: output of `save_to_disk`, or a clone of a data repository.

Splits come from the names of files, else of their folders: `train` trains, `validation` validates, `test` is ignored,
and so are files that name no split where others do, as in Hugging Face's datasets.
Class names and images are read from the features in the files' metadata.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_train.data.dataset.manifest import TRAIN, VALIDATION
from elastic_train.data.tables.importing import Parts, RowOptions, Written, import_rows
from elastic_train.data.tables.labels import USUAL, Labels
from elastic_train.errors import ConfigError
from elastic_train.system.progress_bar import Track, silent

_SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json", ".csv")
_SPLITS = {
    TRAIN: re.compile(r"(^|[^a-z])(train|training)([^a-z]|$)"),
    VALIDATION: re.compile(r"(^|[^a-z])(validation|valid|val|dev)([^a-z]|$)"),
    "test": re.compile(r"(^|[^a-z])(test|testing|eval|evaluation)([^a-z]|$)"),
}
"""The words of Hugging Face's datasets."""
_NOT_TAKEN = "not taken"
_MOST_NAMED = 5


def import_hf_folder(out: Path, folder: Path, options: RowOptions, track: Track = silent) -> Written:
    """Make a dataset of a folder; raise ConfigError if it has no training rows."""
    parts = parts_of(folder)
    return import_rows(out, parts, "hf-folder", options, _class_labels(parts[TRAIN][0], options.label_key), track)


def parts_of(folder: Path) -> Parts:
    """Return the data files of training and validation; raise ConfigError if there are no training rows."""
    found = splits_of(folder)
    parts = {name: found[name] for name in (TRAIN, VALIDATION) if name in found}
    if found.get(None) and TRAIN not in found:
        names = _some([str(path.relative_to(folder)) for path in found[None]])
        raise ConfigError(f"{folder}: has no split 'train': {names} names none; call it train{found[None][0].suffix}")
    if not parts.get(TRAIN):
        raise ConfigError(
            f"{folder}: has no split 'train', and no {', '.join(_SUFFIXES)} file; name a folder that save_to_disk "
            "wrote, or a clone of a dataset's repository (its large files fetched, not pointers to them)"
        )
    return parts


def splits_of(folder: Path) -> Mapping[str | None, Sequence[Path]]:
    """Return the data files of each split, in name order; None has those that name no split, where others do."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder")
    files = _files_in(folder)
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and path.is_dir() and not _is_hidden(path, folder) and _files_in(path):
            raise ConfigError(
                f"{path}: is a link to a folder, whose rows would be left out; put the folder itself there, or link "
                "its files one by one"
            )
    found: dict[str | None, list[Path]] = {}
    for path in files:
        found.setdefault(_split_of(path.relative_to(folder)), []).append(path)
    if {*found} == {None}:
        found = {TRAIN: files}
    kinds = {path.suffix for path in found.get(TRAIN, [])}
    if len(kinds) > 1:
        raise ConfigError(f"{folder}: holds files of several formats ({', '.join(sorted(kinds))}); remove all but one")
    return found


def _split_of(path: Path) -> str | None:
    """Return the split that the last part of a path names, or the part before it, and so on."""
    names = (name.lower() for name in reversed(path.parts))
    return next((split for name in names for split, words in _SPLITS.items() if words.search(name)), None)


def taken_from(folder: Path) -> str:
    """Return which files each part of the dataset is made of, and which ones are not taken."""
    by_part: dict[str, list[str]] = {TRAIN: [], VALIDATION: [], _NOT_TAKEN: []}
    for split, paths in splits_of(folder).items():
        part = split if split in (TRAIN, VALIDATION) else _NOT_TAKEN
        by_part[part] += [str(path.relative_to(folder)) for path in paths]
    return "; ".join(f"{part}: {_some(names)}" for part, names in by_part.items() if names)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _files_in(folder: Path) -> list[Path]:
    """Return the files of rows in a folder, in name order; links to folders are not followed."""
    return sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and _is_rows(path, folder))


def _is_rows(path: Path, folder: Path) -> bool:
    """Return True if a file holds rows: no index or cache, and not in a hidden folder."""
    is_index = path.name in ("dataset_info.json", "dataset_dict.json", "state.json", "dataset_infos.json")
    return path.is_file() and not _is_hidden(path, folder) and not is_index and not path.name.startswith("cache-")


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _class_labels(path: Path, wanted: str | None) -> Labels | None:
    """Return the label's class names, if a file's features have any."""
    features = _features_of(path)
    column = wanted or USUAL
    names = features.get(column, {}).get("names") if isinstance(features.get(column), dict) else None
    return Labels(column, tuple(names)) if isinstance(names, Sequence) and names else None


def _features_of(path: Path) -> Mapping[str, Any]:
    """Return the dataset's features; empty without metadata, or if the file cannot be read, which reading reports."""
    try:
        if path.suffix == ".parquet":
            metadata = pq.read_schema(path).metadata
        elif path.suffix == ".arrow":
            with path.open("rb") as file:
                metadata = pa.ipc.open_stream(file).schema.metadata
        else:
            return {}
        found = json.loads((metadata or {}).get(b"huggingface", b"{}"))
    except (OSError, ValueError):  # Arrow's errors are among these
        return {}
    features = found.get("info", {}).get("features", {})
    return features if isinstance(features, dict) else {}
