"""Resolve names: a run by its folder or its commits' URL, a commit by its step, term-step, or key.

List a store's commits for people: one row each, with marks for the one to resume from and the best.

This is cheap: records are read, and file sizes compared with one listing. Only `is_thorough` reads the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError

from elastic_train.checkpoint.commits.pruning import place_of_attempt
from elastic_train.checkpoint.commits.reader import (
    DAMAGE,
    commit_keys,
    continues,
    damage_of,
    discover,
    read_record,
    records,
    wrong_sizes,
)
from elastic_train.checkpoint.commits.record import CommitRecord, Improvement, is_exhausted
from elastic_train.checkpoint.commits.retention_policies import Best, Candidate, held, holding, pinned
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import Store, read
from elastic_train.config.recipe import EarlyStoppingConfig, parse_best
from elastic_train.core.lineage import ATTEMPTS, COMMITS, place_of, tiling_problems
from elastic_train.errors import CommitError, ConfigError
from elastic_train.system.wording import did_you_mean, nearest
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
    head = discover(store, damage=_damage_while_held).head
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
    return best, _say_best(best, metric or DEFAULT_METRIC, value, head)


def best_metric(run: str, store: Store) -> str:
    """Return the metric by which a run's best commit is chosen: its own, or the default one."""
    stopping, metric = _best_by(run, store)
    return metric or (DEFAULT_METRIC if stopping is None else stopping.metric)


def _best_step(store: Store, head: CommitRecord, reached: Improvement) -> tuple[CommitRecord, str | None]:
    """Return the commit of the best validation, and a sentence if that needs explaining."""
    if reached.best_step >= head.step:
        return head, None
    of_step = (r for _, r, _ in records(store) if r and r.step == reached.best_step and continues(head.intervals, r))
    found = next((record for record in of_step if _damage_while_held(store, record.key) is None), None)
    if found is None:
        best = f"no intact commit of the best validation, step {reached.best_step}, is left"
        return head, f"{best}: using the newest, step {head.step}"
    return found, _say_best(found, reached.metric, reached.best, head)


def _say_best(best: CommitRecord, metric: str, value: float | None, head: CommitRecord) -> str:
    shown = "" if value is None else f" ({metric}: {value:.4f})"
    return f"using the best validation's commit, {best.key}{shown}; --commit {NEWEST} takes step {head.step}"


def _best_commit(store: Store, head: CommitRecord, metric: str) -> CommitRecord | None:
    """Return the head's intact ancestor with the best value of a metric, the first of equal ones."""
    name, is_higher_better = parse_best(metric)
    by_value: list[tuple[float, int, CommitRecord]] = []
    for _, record, _ in records(store):
        value = record.metrics.get(name) if record is not None and continues(head.intervals, record) else None
        if record is not None and value is not None:
            by_value.append((-value if is_higher_better else value, record.step, record))
    in_order = (record for _, _, record in sorted(by_value, key=lambda one: one[:2]))
    return next((record for record in in_order if _damage_while_held(store, record.key) is None), None)


def _damage_while_held(store: Store, key: str) -> str | None:
    """Return what is wrong with a commit, None if it is intact: a job that trains on does not delete it meanwhile."""
    try:
        with holding(store, key):
            return damage_of(store, key)
    except DAMAGE as error:
        return str(error)


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
        meant = "" if name in (NEWEST, BEST) else did_you_mean(nearest(name, (NEWEST, BEST)))
        raise ConfigError(f"{store.url}: no commit is called '{name}'{meant}; the newest, as term-step: {known}")
    return matches[0]


def _names(key: str) -> tuple[str, str, str, str]:
    term, step = place_of(key) or (0, 0)
    return key, f"{term}-{step}", str(step), key.removeprefix(COMMITS).removesuffix(".json")


@dataclass(frozen=True, slots=True)
class Row:
    """One commit; `record` is None and `wrong` says why if it cannot be read."""

    key: str
    record: CommitRecord | None
    wrong: str | None
    marks: tuple[str, ...]

    def fields(self, metric: str, now: float) -> dict[str, object]:
        """Return the columns of the row; None where unknown."""
        term, step = place_of(self.key) or (0, 0)
        record = self.record
        return {
            "key": self.key,
            "step": step,
            "term": term,
            "epoch": record and record.cursor.epoch,
            "age_s": record and round(now - record.created_at, 1),
            "bytes": record and record.num_bytes,
            "world": record and record.world_size,
            metric: record and record.metrics.get(metric),
            "metrics": record and dict(record.metrics),
            "parent": record and record.parent_key,
            "is_valid": self.wrong is None,
            "wrong": self.wrong,
            "marks": list(self.marks),
        }


@dataclass(frozen=True, slots=True)
class Listing:
    """All commits, newest first; bytes of commits, and number and bytes of attempts without a record."""

    rows: tuple[Row, ...]
    num_bytes: int
    abandoned: int
    abandoned_bytes: int


def survey_store(store: Store, best: Best, *, is_thorough: bool = False) -> Listing:
    """List every commit and attempt of a store."""
    sizes = {entry.key: entry.size for entry in store.list(ATTEMPTS)}
    found = list(records(store))
    wrong = {
        key: wrong_with(store, record, None if is_thorough else sizes) if record else problem
        for key, record, problem in found
    }
    marks = _marks(store, best, {key: record for key, record, _ in found}, wrong)
    rows = tuple(Row(key, record, wrong[key], marks[key]) for key, record, _ in found)
    named = {record.attempt for _, record, _ in found if record}
    unreadable = {place_of(key) for key, record, _ in found if record is None}
    loose = {
        key: num_bytes
        for key, num_bytes in sizes.items()
        if (attempt := key.rpartition("/")[0]) not in named and place_of_attempt(attempt) not in unreadable
    }
    return Listing(
        rows,
        num_bytes=sum(sizes.values()) - sum(loose.values()),
        abandoned=len({key.rpartition("/")[0] for key in loose}),
        abandoned_bytes=sum(loose.values()),
    )


def wrong_with(store: Store, record: CommitRecord, sizes: Mapping[str, int] | None = None) -> str | None:
    """Return what is wrong with a commit's files (only sizes if `sizes` is given) or lineage; else None."""
    damage = _damage_while_held(store, record.key) if sizes is None else "; ".join(wrong_sizes(record, sizes))
    if damage:
        return damage
    problems = tiling_problems(record.intervals, record.step)
    return f"its lineage does not tile: {'; '.join(problems)}" if problems else None


def _marks(
    store: Store, best: Best, found: Mapping[str, CommitRecord | None], wrong: Mapping[str, str | None]
) -> dict[str, tuple[str, ...]]:
    """Return each commit's marks: head (to resume from), best, pinned, held."""
    try:
        head = discover(store, damage=lambda _, key: wrong.get(key)).head
    except CommitError:
        head = None  # every row has the reason
    whole = [
        Candidate(key, record.step, _always(record), head) for key, record in found.items() if record and not wrong[key]
    ]
    named = {
        "head": {head.key} if head else set(),
        "best": set(best.wanted(whole)),
        "pinned": pinned(store),
        "held": held(store),
    }
    return {key: tuple(mark for mark, keys in named.items() if key in keys) for key in found}


def _always(record: CommitRecord) -> Callable[[], CommitRecord]:
    return lambda: record
