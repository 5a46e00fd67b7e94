"""How people name things: a run by its folder or by the URL of its commits, a commit by its step, term-step, or key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import ValidationError

from elastic_train.checkpoint.commits.improvement import is_exhausted
from elastic_train.checkpoint.commits.reader import commit_keys, continues, damage_of, discover, read_record, records
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import Store, read
from elastic_train.config.recipe import EarlyStoppingConfig
from elastic_train.core.lineage import ATTEMPTS, COMMITS, place_of
from elastic_train.errors import ConfigError
from elastic_train.tracking.history_files import FOLDER
from elastic_train.tracking.run_folder import CONFIG, RESULT, RunFolder, existing_folder


def open_run(run: str, *, may_be_new: bool = False) -> Store:
    """Open the store of a run's commits, by its folder or URL; ConfigError for a folder that is no run's.

    `may_be_new`: a configuration names it, so it is a run's folder although nothing is there yet.
    """
    if "://" in run:
        return open_store(run)
    folder = existing_folder(run, "; give a run's folder or a URL")
    if not may_be_new and not any((folder / name).exists() for name in _OF_A_RUN):
        raise ConfigError(f"{run} is no run's folder: it has neither {CONFIG} nor {COMMITS}; name a run.dir, or a URL")
    has_commits = (folder / COMMITS).is_dir()
    return open_store((not has_commits and RunFolder(folder).setting("checkpoint", "url")) or run)


NEWEST = "newest"
CONFIGS = "configs/"
_OF_A_RUN = (CONFIG, RESULT, FOLDER, COMMITS, ATTEMPTS, CONFIGS, "terms", "store-id")
"""Each of them is in the folder of a run, or of its commits, from some moment on."""


def find(store: Store, name: str | None) -> CommitRecord:
    """Return the commit that a person names, or the newest intact one; ConfigError if there is none."""
    if name is not None and name != NEWEST:
        return read_record(store, name_to_key(store, name))
    head = discover(store).head
    if head is None:
        raise ConfigError(f"{store.url}: no commits; is this the run's folder, or the URL of its commits?")
    return head


def find_trained(run: str, name: str | None) -> tuple[CommitRecord, str | None]:
    """Return the commit whose model a person wants, and a sentence if it is not the newest, or should not be it.

    Without a name it is the best one of a run that early stopping has ended, and else the newest; `newest` names that.
    """
    store = open_run(run)
    head = find(store, name)
    best = head.improvement
    if name is not None or best is None or not 0 < best.best_step < head.step:
        return head, None
    if not is_exhausted(_early_stopping(run, store), best):
        return head, None
    why = f"early stopping ended this run after step {head.step}: its best validation ({best.metric}: {best.best}) was"
    of_step = (r for _, r, _ in records(store) if r and r.step == best.best_step and continues(head.intervals, r))
    found = next((record for record in of_step if damage_of(store, record.key) is None), None)
    if found is None:
        return head, f"{why} that of step {best.best_step}, of which no intact commit is left; the newest is used"
    return found, f"{why} that of {found.key}, which is used; --commit {NEWEST} takes step {head.step}"


def _early_stopping(run: str, store: Store) -> EarlyStoppingConfig | None:
    """Return how a run ends early, by its folder, or by the configuration beside its commits; None if it does not."""
    config: Mapping[str, object] = {}
    if "://" not in run and (Path(run) / CONFIG).is_file():
        config = RunFolder(Path(run)).config()
    elif copies := store.list(CONFIGS):
        config = yaml.safe_load(read(store, copies[-1].key))
    validation = config.get("validation")
    keys = validation.get("early_stopping") if isinstance(validation, dict) else None
    try:
        return None if keys is None else EarlyStoppingConfig.model_validate(keys)
    except ValidationError as error:
        raise ConfigError(f"{run}/{CONFIG}: is of another version: {error}") from error


def name_to_key(store: Store, name: str) -> str:
    """Return the key of the commit that a person names; of several at one step it is the newest term's."""
    keys = commit_keys(store)
    matches = [key for key in keys if name in _names(key)]
    if not matches:
        known = ", ".join(_names(key)[1] for key in keys[:5]) or "none"
        raise ConfigError(f"{store.url}: no commit is called '{name}'; the newest, as term-step: {known}")
    return matches[0]


def _names(key: str) -> tuple[str, str, str, str]:
    term, step = place_of(key) or (0, 0)
    return key, f"{term}-{step}", str(step), key.removeprefix(COMMITS).removesuffix(".json")
