"""Check the datasets and files that flags of model commands name, before a model is loaded; no torch is imported."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec

from elastic_train.data.corpora.tokenizer import CHAT_TEMPLATE, FILE_NAME
from elastic_train.data.dataset.manifest import NAME, Manifest, load_manifest, parts_of, why_absent
from elastic_train.data.dataset.schemas import ROW_SUFFIXES
from elastic_train.data.parquet.sources import reaching
from elastic_train.errors import ConfigError, DataError
from elastic_train.tracking.run_folder import RunFolder, existing_folder

_OTHER_FORMATS = frozenset(
    f".{name}" for name in ("csv", "tsv", "txt", "json", "jsonl", "arrow", "feather", "npy", "npz", "xlsx", "pkl")
)


def check_new(target: Path | None) -> None:
    """Refuse a name that is taken."""
    if target is not None and target.exists():
        raise ConfigError(f"{target}: exists already; give another name")


def check_parquet(out: Path) -> None:
    """Refuse the name of a Parquet file that is taken, or ends as those of another format."""
    if out.suffix.lower() in _OTHER_FORMATS:
        raise ConfigError(
            f"--out {out}: predictions are a Parquet file: name it {out.with_suffix('.parquet')}; pandas.read_parquet "
            "reads it, and its to_csv writes a CSV"
        )
    check_new(out)


def validation_set(run: str) -> str:
    """Return the place of a run's validation set; raise ConfigError if it has none."""
    folder = RunFolder(existing_folder(run))
    if (data := folder.from_here(folder.setting("data", "validation"))) is None:
        raise ConfigError(f"{run}: was trained without validation data: name a dataset to evaluate it on, --data DATA")
    return data


def find_dataset(run: str, data: str, train: Sequence[str] | None = None) -> str:
    """Return the dataset at a place, or its part if it has just one.

    Raise ConfigError if there is none; of a file it says how to import it for the run, whose training set is at
    `train`, if that has moved.
    """
    with reaching(data):
        fs, root = fsspec.core.url_to_fs(data)
        is_there, is_file = fs.exists(f"{root}/{NAME}"), fs.isfile(root)
    if is_there:
        return data
    if is_file and Path(data).suffix.lower() in ROW_SUFFIXES:
        out = "OUT" if "://" in data else data.rpartition(".")[0]
        commands, name = _as_trained(run, train, data, out)
        raise ConfigError(
            f"{data}: is a file, and a dataset is a folder: import the file with {commands}, and name {name}"
        )
    parts = parts_of(data)
    if len(parts) != 1:
        raise ConfigError(why_absent(data))
    return parts[0]


def _as_trained(run: str, train: Sequence[str] | None, file: str, out: str) -> tuple[str, str]:
    """Return the commands that import rows like a run's training set, and the dataset that they make.

    A training set that cannot be read here adds nothing to them.
    """
    folder, rows = RunFolder(Path(run)), f"elastic-train data import rows {shlex.quote(out)} {shlex.quote(file)}"
    try:
        known = load_manifest((train or folder.training_sets())[0])
    except (DataError, ConfigError, IndexError):
        return f"`{rows} --validation-share 0`", out
    task = folder.config().get("task")
    params = (task.get("params") if isinstance(task, dict) else None) or {}
    flags = {"numeric": known.numeric_columns, "categorical": known.categorical_columns}
    flags |= _tokenizer_of(known, folder, params)
    rows += "".join(f" --{name} {shlex.join(values)}" for name, values in flags.items() if values)
    rows += " --validation-share 0"
    if "document_ids" not in known.columns:
        return f"`{rows}`", out
    packed, length = f"{out}-packed", params.get("max_tokens", "LENGTH")
    pack = f"elastic-train data pack {shlex.quote(packed)} {shlex.quote(out)} --length {length} --validation-share 0"
    return f"`{rows}`, pack it with `{pack}`", packed


def _tokenizer_of(known: Manifest, folder: RunFolder, params: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the flags of a dataset's tokenizer and, for chats, its template.

    The model's folder is named if its tokenizer is the same: only there are the special tokens that a template uses.
    """
    if known.tokenizer is None:
        return {}
    place, source = known.url.rstrip("/"), params.get("hf")
    model = folder.from_here(source.get("path")) if isinstance(source, dict) else None
    file = Path(model or "", FILE_NAME)
    is_same = file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == known.tokenizer_sha256
    flags: dict[str, tuple[str, ...]] = {"tokenizer": (str(model) if is_same else f"{place}/{known.tokenizer}",)}
    template = Path(place, CHAT_TEMPLATE)
    if template.is_file() and {"labels", "chosen_labels"} & set(known.columns):
        flags["chat-template"] = (str(template),)
    return flags
