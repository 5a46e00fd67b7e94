"""Resolve names: a run by its folder or its commits' URL, a commit by its step, term-step, or key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import ValidationError

from elastic_train.checkpoint.commits.reader import commit_keys, continues, damage_of, discover, read_record, records
from elastic_train.checkpoint.commits.record import CommitRecord, Improvement, is_exhausted
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import Store, read
from elastic_train.config.recipe import EarlyStoppingConfig, parse_best
from elastic_train.core.lineage import ATTEMPTS, COMMITS, place_of
from elastic_train.errors import ConfigError
from elastic_train.tracking.history_files import FOLDER
from elastic_train.tracking.run_folder import CONFIG, RESULT, RunFolder, existing_folder


def open_run(run: str, *, may_be_new: bool = False) -> Store:
    """Open the store of a run's commits, by folder or URL; raise ConfigError if the folder is not a run's.

    `may_be_new`: accept an empty folder that a configuration names.
    """
    if "://" in run:
        return open_store(run)
    folder = existing_folder(run, "; give a run's folder or a URL")
    if not may_be_new and not any((folder / name).exists() for name in _OF_A_RUN):
        raise ConfigError(f"{run} is no run's folder: it has neither {CONFIG} nor {COMMITS}; name a run.dir, or a URL")
    has_commits = (folder / COMMITS).is_dir()
    found = RunFolder(folder)
    own = [name for name in _OF_A_RUN if name not in (CONFIG, ATTEMPTS)]  # a project's dataset is in `data`
    if not any((folder / name).exists() for name in own) and (named := found.of_another_run()):
        raise ConfigError(f"{run} is no run's folder: its {CONFIG} is for the run in {named}; name that")
    return open_store((not has_commits and found.from_here(found.setting("checkpoint", "url"))) or run)


NEWEST, BEST = "newest", "best"
DEFAULT_METRIC = "min loss"
CONFIGS = "configs/"
_OF_A_RUN = (CONFIG, RESULT, FOLDER, COMMITS, ATTEMPTS, CONFIGS, "terms", "store-id")
"""Entries that identify the folder of a run or of its commits."""


def find(store: Store, name: str | None) -> CommitRecord:
    """Return the named commit, or the newest intact one; raise ConfigError if there is none."""
    if name is not None and name != NEWEST:
        return read_record(store, name_to_key(store, name))
    head = discover(store).head
    if head is None:
        raise ConfigError(f"{store.url}: no commits; is this the run's folder, or the URL of its commits?")
    return head


def find_trained(run: str, name: str | None) -> tuple[CommitRecord, str | None]:
    """Return the commit whose model to use, and a sentence if it is not the newest, or should not be.

    By default it is the best commit if early stopping ended the run or the run keeps its best commit, else the newest.
    `best` and `newest` select explicitly. Raise ConfigError if there is none.
    """
    store = open_run(run)
    if name not in (None, BEST):
        return find(store, name), None
    head, (stopping, metric) = find(store, None), _best_by(run, store)
    reached = head.improvement
    is_kept = reached is not None and reached.metric == metric
    if reached is not None and reached.best_step and (name == BEST or is_kept or is_exhausted(stopping, reached)):
        return _best_step(store, head, reached)
    if name is None and metric is None:
        return head, None
    best = _best_commit(store, head, metric or DEFAULT_METRIC)
    if best is None and name == BEST:
        raise ConfigError(
            f"{run}: no commit has a value to be the best by ({metric or DEFAULT_METRIC}): train with data.validation, "
            f"or take --commit {NEWEST}"
        )
    if best is None or best.key == head.key:
        return head, None
    value = best.metrics[parse_best(metric or DEFAULT_METRIC)[0]]
    why = f"{best.key} has this run's best validation ({metric or DEFAULT_METRIC}: {value})"
    return best, f"{why}, and is used; --commit {NEWEST} takes step {head.step}"


def best_metric(run: str, store: Store) -> str:
    """Return the metric by which a run's best commit is chosen: its own, or the default one."""
    stopping, metric = _best_by(run, store)
    return metric or (DEFAULT_METRIC if stopping is None else stopping.metric)


def _best_step(store: Store, head: CommitRecord, reached: Improvement) -> tuple[CommitRecord, str | None]:
    """Return the commit of the best validation, and a sentence if that needs explaining."""
    if reached.best_step >= head.step:
        return head, None
    why = f"the best validation of this run, whose last step is {head.step}, ({reached.metric}: {reached.best}) was"
    of_step = (r for _, r, _ in records(store) if r and r.step == reached.best_step and continues(head.intervals, r))
    found = next((record for record in of_step if damage_of(store, record.key) is None), None)
    if found is None:
        return head, f"{why} that of step {reached.best_step}, of which no intact commit is left; the newest is used"
    return found, f"{why} that of {found.key}, which is used; --commit {NEWEST} takes step {head.step}"


def _best_commit(store: Store, head: CommitRecord, metric: str) -> CommitRecord | None:
    """Return the head's intact ancestor with the best value of a metric, the first of equal ones."""
    name, is_higher_better = parse_best(metric)
    by_value: list[tuple[float, int, CommitRecord]] = []
    for _, record, _ in records(store):
        value = record.metrics.get(name) if record is not None and continues(head.intervals, record) else None
        if record is not None and value is not None:
            by_value.append((-value if is_higher_better else value, record.step, record))
    in_order = (record for _, _, record in sorted(by_value, key=lambda one: one[:2]))
    return next((record for record in in_order if damage_of(store, record.key) is None), None)


def _best_by(run: str, store: Store) -> tuple[EarlyStoppingConfig | None, str | None]:
    """Return a run's early stopping settings, and the metric by which it keeps its best commit; None if off."""
    config: Mapping[str, object] = {}
    if "://" not in run and (Path(run) / CONFIG).is_file():
        config = RunFolder(Path(run)).config()
    elif copies := store.list(CONFIGS):
        config = yaml.safe_load(read(store, copies[-1].key))
    validation, checkpoint = config.get("validation"), config.get("checkpoint")
    keys = validation.get("early_stopping") if isinstance(validation, dict) else None
    metric = checkpoint.get("keep_best") if isinstance(checkpoint, dict) else None
    try:
        return None if keys is None else EarlyStoppingConfig.model_validate(keys), metric
    except ValidationError as error:
        raise ConfigError(f"{run}/{CONFIG}: is of another version: {error}") from error


def name_to_key(store: Store, name: str) -> str:
    """Return the key of a named commit; of several at one step, the newest term's."""
    keys = commit_keys(store)
    matches = [key for key in keys if name in _names(key)]
    if not matches:
        known = ", ".join(_names(key)[1] for key in keys[:5]) or "none"
        raise ConfigError(f"{store.url}: no commit is called '{name}'; the newest, as term-step: {known}")
    return matches[0]


def _names(key: str) -> tuple[str, str, str, str]:
    term, step = place_of(key) or (0, 0)
    return key, f"{term}-{step}", str(step), key.removeprefix(COMMITS).removesuffix(".json")
