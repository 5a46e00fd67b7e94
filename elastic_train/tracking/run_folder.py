"""A run's folder and its files: config.yaml, result.json, mlflow.json.

A run writes each of them atomically. A damaged or foreign file is the user's mistake, and raises ConfigError with its
path; a file that does not exist yet is None.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from elastic_train.errors import ConfigError
from elastic_train.system.file_systems import STARTED_IN, absolute
from elastic_train.system.files import write_atomically
from elastic_train.system.wording import did_you_mean, first_line, nearest, updates_left_out
from elastic_train.tracking.history_files import FOLDER

CONFIG, RESULT, LINK = "config.yaml", "result.json", "mlflow.json"
LAST_STEP, EARLY_STOPPING = "last step", "early stopping"
"""Reasons why training ended, as written in result.json."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader, ten times as fast, where PyYAML has it: a start reads its configuration several times."""


def existing_folder(name: str | Path, otherwise: str = "; name the folder of a run (run.dir)") -> Path:
    """Return the named folder; raise ConfigError, with a likely name or else `otherwise`, if it is not one."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"{name}: this is a file, not a folder{otherwise}")
    beside = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
    meant = nearest(folder.name, beside)
    raise ConfigError(
        f"{name}: this folder does not exist{did_you_mean(meant and str(folder.parent / meant), otherwise)}"
    )


@dataclass(frozen=True, slots=True)
class Link:
    """A job's own name, its run id in MLflow, and the MLflow URI (without a password)."""

    job: str
    run_id: str | None = None
    mlflow_uri: str | None = None


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder (`run.dir`); files are read on demand."""

    path: Path

    def config(self) -> Mapping[str, object]:
        """Return the resolved configuration; raise ConfigError if it is missing: the folder is not a run's."""
        if not (self.path / CONFIG).is_file():
            raise ConfigError(f"{self.path} is not a run's folder: it has no {CONFIG}; name a run.dir")
        return _mapping(self.path / CONFIG, functools.partial(yaml.load, Loader=_LOADER))

    def setting(self, section: str, key: str) -> str | None:
        """Return one configuration value as text; None if it is unset or there is no configuration."""
        if not (self.path / CONFIG).is_file():
            return None
        keys = self.config().get(section)
        value = keys.get(key) if isinstance(keys, dict) else None
        return str(value) if value else None

    def training_sets(self) -> list[str]:
        """Return the folders or URLs of the training data, one or a mixture's; empty without a configuration."""
        data = self.config().get("data") if (self.path / CONFIG).is_file() else None
        fields = data if isinstance(data, dict) else {}
        sources = [each["source"] for each in fields.get("mixture") or () if isinstance(each, dict)]
        return [found for url in (fields.get("train"), *sources) if url and (found := self.from_here(str(url)))]

    def started_in(self) -> Path | None:
        """Return the folder in which the run was started; None if that is not known, or not there."""
        try:
            with (self.path / CONFIG).open() as file:
                line = file.readline()
        except OSError:
            return None
        folder = Path(line.removeprefix(STARTED_IN).rstrip("\n"))
        return folder if line.startswith(STARTED_IN) and folder.is_dir() else None

    def from_here(self, url: str | None) -> str | None:
        """Return the absolute path of a configured folder, which is relative to where the run was started.

        If it is not there, as the run was moved, or that is not known, it is that of the working folder, or of the
        nearest parent of this folder, in which it exists.
        """
        if url is None or "://" in url or Path(url).expanduser().is_absolute():
            return absolute(url)
        started = self.started_in()
        places = [place / url for place in (started, Path.cwd(), *self.path.absolute().parents) if place is not None]
        return str(next((place for place in places if place.exists()), places[0]))

    def of_another_run(self) -> str | None:
        """Return the run.dir of the configuration in this folder; None if it is this folder, or not given."""
        named = self.setting("run", "dir")
        if named is None or Path(self.from_here(named) or named).resolve() == self.path.resolve():
            return None
        return str(self.path / named)

    def result(self) -> Mapping[str, object] | None:
        """Return how the run ended (see docs/operations/run.md); None while it has not."""
        path = self.path / RESULT
        return _mapping(path, json.loads) if path.exists() else None

    def link(self) -> Link | None:
        """Return the run's link to MLflow; None if there is none, or it was damaged by a power cut."""
        try:
            return Link(**json.loads((self.path / LINK).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def write_link(self, link: Link) -> None:
        """Store the link for the next process that opens the run."""
        write_atomically(self.path / LINK, json.dumps(asdict(link)) + "\n")


def _mapping(path: Path, parse: Callable[[str], object]) -> Mapping[str, object]:
    try:
        fields = parse(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {first_line(error)}; name the folder of a run") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} has no keys (it is empty, or not a run's); name the folder of a run")
    return fields


def look_up_left_out(run: str, steps: Iterable[Sequence[int]]) -> str:
    """Return how many updates were left out, and where their samples are named."""
    return f"{updates_left_out(steps)} (see the lines with op nonfinite in {run}/{FOLDER})"


def weights_command(run: str) -> str:
    """Return the command that exports a run's weights."""
    return f"elastic-train export {shlex.quote(run)} --to safetensors"
