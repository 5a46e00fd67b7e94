"""A process's knowledge of its store: whether it can write there, determined in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_train.checkpoint.saving import store_health
from elastic_train.checkpoint.saving.store_health import MOST_UNWRITTEN, StoreHealth, probe
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.store import NotAllowed
from elastic_train.errors import StorageError
from tests.conftest import PATIENCE_S


@pytest.fixture
def create(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Set an action that runs before a key is created."""

    def before(act: Callable[[], None]) -> None:
        real = LocalStore.create

        def create(store: LocalStore, key: str, content: bytes) -> None:
            act()
            real(store, key, content)

        monkeypatch.setattr(LocalStore, "create", create)

    return before


def refuse() -> None:
    raise StorageError("read-only file system")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_probe_leaves_nothing(tmp_path: Path) -> None:
    probe(str(tmp_path))
    assert LocalStore(tmp_path).list(store_health.PROBES) == []


def test_a_process_vouches_for_itself_once_it_has_found_out(tmp_path: Path) -> None:
    """It does not do so at the first question, nor after its own saves have failed."""
    use = StoreHealth(str(tmp_path))
    assert not use.confirm_writable()
    until(use.confirm_writable)
    use.note_unwritten(StorageError("full"), is_silent=False)
    assert not use.confirm_writable()
    use.note_written()
    until(use.confirm_writable)


def test_a_barred_process_writes_again_when_it_can(
    tmp_path: Path, create: Callable[[Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use = StoreHealth(str(tmp_path))
    assert use.try_again()
    use.exclude()
    with monkeypatch.context():
        create(refuse)
        assert not use.try_again() and use.why == "read-only file system"
    monkeypatch.undo()
    assert use.try_again() and not use.is_barred


def test_storage_that_hangs_holds_nobody_up(
    tmp_path: Path, create: Callable[[Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An excluded process waits for an answer only briefly, and starts no second check meanwhile."""
    monkeypatch.setattr(store_health, "ANSWER_S", 0.05)
    thawed, num_asked = threading.Event(), [0]

    def hang() -> None:
        num_asked[0] += 1
        thawed.wait(PATIENCE_S)

    create(hang)
    use = StoreHealth(str(tmp_path))
    use.exclude()
    assert not use.try_again()
    until(lambda: num_asked == [1])
    assert not use.try_again() and num_asked == [1]
    thawed.set()
    until(use.try_again)


def test_a_process_that_cannot_even_say_so_counts_at_once(tmp_path: Path) -> None:
    """Otherwise rank 0 would wait for its part in vain, at every save."""
    use = StoreHealth(str(tmp_path))
    use.note_unwritten(NotAllowed("read-only"), is_silent=True)
    assert use.num_unwritten == MOST_UNWRITTEN and use.is_refused
    use.note_unwritten(StorageError("input/output error"), is_silent=False)
    assert not use.is_refused
