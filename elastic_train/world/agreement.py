"""Agree on decisions and errors: all ranks of a world act on what one rank knows.

`agree`: rank 0 looks at the outside world and decides; every rank gets its answer, or raises its error.

`say_why` and `heard`: a rank that fails anywhere else leaves its error in the world's store and closes its connections;
its peers, which only see a closed connection, read it there. As the store may be in rank 0's process, that process
waits a moment until all others have looked. Only for worlds that end with their processes: in live recovery, the others
continue.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from elastic_train import errors
from elastic_train.errors import ElasticTrainError, HungError, PeerLostError, RowError
from elastic_train.parallel.group import Group
from rendezvous.waiting import LOOK_EVERY_S, GivenUp, begin

T = TypeVar("T")

WHY, NUM_READY = "why", "ready to end"
ANSWER_S, READY_S = 2.0, 5.0
"""Seconds to wait for the store's answer, and for all ranks to be ready to end: they may share processors."""


def agree(group: Group, decide: Callable[[], T]) -> T:
    """Let rank 0 decide and tell the others; if it fails, every rank raises an error of the same class.

    `decide` must return a JSON value (a tuple arrives as a list).
    """
    if group.rank == 0:
        try:
            value = decide()
        except ElasticTrainError as error:
            group.broadcast_object({"error": _public_name(error), "message": str(error)}, 0)
            raise
        group.broadcast_object({"value": value}, 0)
        return value
    answer = group.broadcast_object(None, 0)
    assert isinstance(answer, dict), "rank 0 sends a value or an error"
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"])
    return answer["value"]  # type: ignore[no-any-return]


def _public_name(error: BaseException) -> str:
    """Return the name of the nearest class in errors.py; packages have subclasses of their own."""
    return next(kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__))


def say_why(group: Group, error: BaseException) -> None:
    """Tell the peers why this rank ends their world, and abandon its group."""
    if group.store is None:
        return
    store, is_ours = group.store, isinstance(error, ElasticTrainError)
    text = str(error) if is_ours else f"{type(error).__name__}: {error}"
    words = {"rank": group.rank, "kind": _public_name(error) if is_ours else "", "text": text}

    def say() -> None:
        store.set(WHY, json.dumps(words))
        store.add(NUM_READY, 1)

    _ask(say)
    with contextlib.suppress(HungError):
        group.abandon()
    _await_others(group, store)


def heard(group: Group, lost: PeerLostError) -> ElasticTrainError:
    """Return the error that a lost peer left behind, or else the one that this rank has."""
    if group.store is None:
        return lost
    store = group.store

    def listen() -> bytes | None:
        if not store.check([WHY]):
            return None
        store.add(NUM_READY, 1)
        return bytes(store.get(WHY))

    words = _ask(listen)
    if words is None:
        return lost
    with contextlib.suppress(HungError):
        group.abandon()  # others may wait for this rank alone
    _await_others(group, store)
    said = json.loads(words)
    if said["kind"] == RowError.__name__:  # this rank would find it, too, in a world without that one
        return RowError(said["text"])
    return PeerLostError(f"rank {said['rank']} of {group.size} has ended: {said['text']}")


def _await_others(group: Group, store: Store) -> None:
    """Keep rank 0's process until all ranks have looked, because it may host the store."""
    until = time.monotonic() + READY_S
    while group.rank == 0 and time.monotonic() < until:
        if (_ask(lambda: store.add(NUM_READY, 0)) or group.size) >= group.size:
            return
        time.sleep(LOOK_EVERY_S)


def _ask(question: Callable[[], T]) -> T | None:
    """Return the store's answer; None if its process has ended, or it does not answer."""
    with contextlib.suppress(GivenUp, RuntimeError):
        return begin("why", question).result(ANSWER_S)
    return None
