"""Commits are listed with their facts and damage, and found by their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from elastic_train.checkpoint.commits.lookup import find, name_to_key, survey_store
from elastic_train.checkpoint.commits.pruning import prune
from elastic_train.checkpoint.commits.retention_policies import Best, Retention
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.store import Store
from elastic_train.errors import ConfigError
from tests.elastic_train.checkpoint.commit_samples import commit_steps, facts, small_state, writer

BEST = Best.parse("min loss")


def test_a_row_has_the_facts_of_its_commit(local_store: Store) -> None:
    first, second = commit_steps(local_store, 1, 2)
    rows = survey_store(local_store, BEST).rows
    fields = rows[0].fields("loss", second.created_at + 61.26)
    expected = {"key": second.key, "step": 2, "term": 1, "age_s": 61.3, "world": 2, "loss": 1 / 3, "is_valid": True}
    assert {name: fields[name] for name in expected} == expected
    assert [row.key for row in rows] == [second.key, first.key]


def test_only_a_thorough_list_reads_the_files(local_store: Store) -> None:
    """A changed byte leaves a file's size as it was."""
    [commit] = commit_steps(local_store, 1)
    path = Path(local_store.url) / commit.attempt / "__0_0.distcp"
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert [row.wrong for row in survey_store(local_store, BEST).rows] == [None]
    assert survey_store(local_store, BEST, is_thorough=True).rows[0].wrong is not None


def test_a_commit_is_found_by_its_step_its_term_and_step_or_its_key(local_store: Store) -> None:
    _, second = commit_steps(local_store, 1, 2)
    for name in ("2", "1-2", second.key, second.key.removeprefix("commits/").removesuffix(".json")):
        assert name_to_key(local_store, name) == second.key
    with pytest.raises(ConfigError, match=r"no commit is called '9'; the newest, as term-step: 1-2, 1-1$"):
        name_to_key(local_store, "9")
    with pytest.raises(ConfigError, match="no commit is called 'newst'; did you mean 'newest'"):
        name_to_key(local_store, "newst")
    with pytest.raises(ConfigError, match=r"no commit is called 'best'; the newest, as term-step: 1-2, 1-1$"):
        name_to_key(local_store, "best")  # where a commit itself is to be named, as for `ckpt pin`


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_commit_is_not_deleted_while_it_is_examined(tmp_path: Path, is_listed: bool) -> None:
    """A running job that keeps few commits would delete a large one before all of it has been read."""

    class Busy(LocalStore):
        """Lets the job go on when the files of a commit are read."""

        go_on: Callable[[], object] = staticmethod(lambda: None)

        def open(self, key: str) -> BinaryIO:
            if key.startswith("data/"):
                self.go_on()
            return super().open(key)

    store = Busy(tmp_path)
    commits = writer(store)
    newest, steps = commits.save(small_state(1), facts(1)), iter(range(2, 10))

    def go_on() -> None:
        step = next(steps)
        prune(store, Retention.of(last=1), newest=commits.save(small_state(step), facts(step)))

    store.go_on = go_on
    if is_listed:
        (row,) = survey_store(store, BEST, is_thorough=True).rows
        assert (row.record, row.wrong) == (newest, None)
    else:
        assert find(store, None) == newest
    assert store.list("holds/") == [] and next(steps) > 3
