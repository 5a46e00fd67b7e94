"""How people name things: a run by its folder or by the URL of its commits, a commit by its step, term-step, or key."""

from __future__ import annotations

from elastic_train.checkpoint.commits.reader import commit_keys, discover, read_record
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import Store
from elastic_train.core.lineage import COMMITS, place_of
from elastic_train.errors import ConfigError
from elastic_train.tracking.run_folder import RunFolder, existing_folder


def open_run(run: str) -> Store:
    """Open the store of a run's commits, by its folder or URL; ConfigError if the folder does not exist."""
    if "://" in run:
        return open_store(run)
    folder = existing_folder(run, "; give a run's folder or a URL")
    has_commits = (folder / COMMITS).is_dir()
    return open_store((not has_commits and RunFolder(folder).setting("checkpoint", "url")) or run)


def find(store: Store, name: str | None) -> CommitRecord:
    """Return the commit that a person names, or the newest intact one; ConfigError if there is none."""
    if name is not None:
        return read_record(store, name_to_key(store, name))
    head = discover(store).head
    if head is None:
        raise ConfigError(f"{store.url}: no commits; is this the run's folder, or the URL of its commits?")
    return head


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
