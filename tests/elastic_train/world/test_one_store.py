"""A job has one store: a rank that sees another one is rejected with an explanation, and the others continue."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chaos.services.s3_server import S3
from elastic_train.checkpoint import open_store
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.errors import ConfigError, StorageError
from elastic_train.world import one_store
from elastic_train.world.claims import Own, new_claim, term_key
from elastic_train.world.fencing import StoreFence
from elastic_train.world.one_store import (
    Claimed,
    check,
    check_before_joining,
    check_first,
    choose,
    identify,
    proves_itself,
)


class Ranks:
    """A group in whose gather the other ranks have already looked."""

    def __init__(self, *others: str | None) -> None:
        self.others = [0 if word is None else int(word, 16) for word in others]

    def all_gather(self, mine: torch.Tensor) -> torch.Tensor:
        return torch.tensor([int(mine), *self.others])


def choose_among(store: Any, *others: str | None) -> tuple[str | None, bool]:
    return choose(Ranks(*others), store)  # type: ignore[arg-type]


def test_a_store_gets_one_word(tmp_path: Path) -> None:
    """A later process reads the id that the first one wrote."""
    word = identify(LocalStore(tmp_path))
    assert identify(LocalStore(tmp_path)) == word
    check(LocalStore(tmp_path), word)


@pytest.mark.parametrize("is_used", [True, False])
def test_another_store_is_refused(tmp_path: Path, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """This node may have its own commits there, or an empty folder."""
    monkeypatch.setattr(one_store, "LOCAL_PATIENCE_S", 0.0)
    other = LocalStore(tmp_path / "other")
    if is_used:
        identify(other)
    with pytest.raises(ConfigError, match=r"other .*is not where this job keeps its commits: it has .*run.dir"):
        check(other, identify(LocalStore(tmp_path / "job")))


@pytest.mark.parametrize("look", [check, check_first])
def test_a_copy_of_the_store_is_refused(tmp_path: Path, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the id and every file, but lacks rank 0's later claims, or has an additional claim."""
    monkeypatch.setattr(one_store, "LOCAL_PATIENCE_S", 0.0)
    monkeypatch.setattr(one_store, "LEADER_S", 0.0)
    job, copy = LocalStore(tmp_path / "job"), LocalStore(tmp_path / "copy")
    word = identify(job)
    StoreFence(job).claim()
    shutil.copytree(tmp_path / "job", tmp_path / "copy")
    fence = StoreFence(job)
    claimed = Claimed(fence.claim(), fence.nonce)
    look(job, word, claimed=claimed)
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"copy .*not where this job .*terms/00000002.json, which rank 0 has just"
        ):
            look(copy, word, claimed=claimed)
        assert StoreFence(copy).claim() >= 2


def test_a_claim_that_is_seen_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait lasts as long as rank 0 is there; if it left because its own store was wrong, the world has ended."""
    monkeypatch.setattr(one_store, "LOOK_S", 0.0)
    store, asked = LocalStore(tmp_path), list[float]()
    word, (content, nonce) = identify(store), new_claim(Own("run"))

    def still(waited_s: float) -> None:
        asked.append(waited_s)
        if len(asked) == 3:
            store.create(term_key(1), content)

    check(store, word, still, Claimed(1, nonce))
    assert len(asked) == 3


def test_a_word_that_is_seen_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS client may not see the key for a while; meanwhile the world is asked whether it still exists."""
    monkeypatch.setattr(one_store, "LOOK_S", 0.0)
    asked: list[float] = []

    def still(waited_s: float) -> None:
        asked.append(waited_s)
        if len(asked) == 3:
            LocalStore(tmp_path).create(one_store.KEY, b"word")

    check(LocalStore(tmp_path), "word", still)
    assert len(asked) == 3


def test_the_first_world_keeps_its_commits_where_most_ranks_see_them(tmp_path: Path) -> None:
    """One node without its mount is rejected, even if it leads; of two nodes the leader's store counts."""
    mine = LocalStore(tmp_path)
    word = identify(mine)
    assert choose_among(mine, word, "1") == (word, True)
    assert choose_among(mine, "1") == (word, True)
    with pytest.raises(ConfigError, match="another store-id"):
        choose_among(mine, "1", "1")


def test_a_store_that_does_not_answer_has_no_say() -> None:
    """Its rank trains without writing a part; an outage does not cause a rejection."""

    def fail(*_: object) -> None:
        raise StorageError("away")

    assert choose_among(SimpleNamespace(open=fail, url="away"), "1") == (f"{1:015x}", False)
    assert choose_among(SimpleNamespace(open=fail, url="away"), None) == (None, False)


def test_who_cannot_ask_joins_and_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it joins, a process is rejected for a wrong store only."""
    config: Any = SimpleNamespace(checkpoint_url=str(tmp_path))
    check_before_joining(config, None, lambda: None)
    (tmp_path / one_store.KEY).mkdir()
    check_before_joining(config, "word", lambda: None)
    (tmp_path / one_store.KEY).rmdir()
    monkeypatch.setattr(one_store, "LOCAL_PATIENCE_S", 0.0)
    with pytest.raises(ConfigError, match="has no store-id"):
        check_before_joining(config, "word", lambda: None)


def test_a_store_that_creates_a_key_twice_is_refused(tmp_path: Path) -> None:
    """Any folder passes; an S3 server that ignores If-None-Match fails, and its data stays."""
    local = LocalStore(tmp_path)
    assert proves_itself(local, identify(local))
    assert not proves_itself(local, "another")


@pytest.mark.slow
def test_an_s3_that_ignores_conditions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the store and the header; the same server passes once it honours the header."""
    with S3() as s3:
        for name, value in s3.environ.items():
            monkeypatch.setenv(name, value)
        store = open_store(s3.url("run"))
        word = identify(store)
        spoilt = s3.spoil("no_conditional_create")
        with pytest.raises(ConfigError, match=r"/run ignores .* honours If-None-Match"):
            proves_itself(store, word)
        s3.heal(spoilt)
        assert proves_itself(store, word) and identify(store) == word
