"""Check the datasets and files that flags of model commands name, before a model is loaded; no torch is imported."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import fsspec

from elastic_train.data.dataset.manifest import NAME, load_manifest, parts_of, why_absent
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
    if is_file:
        out = data.rpartition(".")[0] if Path(data).suffix and "://" not in data else "OUT"
        raise ConfigError(
            f"{data}: is a file, and a dataset is a folder: import the file with `elastic-train data import rows "
            f"{shlex.quote(out)} {shlex.quote(data)}{_as_trained(run, train)} --validation-share 0`, and name {out}"
        )
    parts = parts_of(data)
    if len(parts) != 1:
        raise ConfigError(why_absent(data))
    return parts[0]


def _as_trained(run: str, train: Sequence[str] | None) -> str:
    """Return the flags that import rows as those of a run's training set, as far as it can be read."""
    try:
        known = load_manifest((train or RunFolder(Path(run)).training_sets())[0])
    except (DataError, ConfigError, IndexError):
        return ""
    flags = {"numeric": known.numeric_columns, "categorical": known.categorical_columns}
    if known.tokenizer is not None:
        flags["tokenizer"] = (f"{known.url.rstrip('/')}/{known.tokenizer}",)
    return "".join(f" --{name} {shlex.join(values)}" for name, values in flags.items() if values)
