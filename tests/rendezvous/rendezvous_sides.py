"""Shared code for the tests of this folder, besides fixtures: store implementations, and waiting for a condition."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyetcd

from rendezvous import EtcdStore, Store, etcd_options
from tests.conftest import PATIENCE_S


@dataclass(frozen=True)
class Side:
    """One implementation of the store, and how its time passes."""

    store: Store
    pass_time: Callable[[float], None]
    prefix: str
    later: Callable[[Callable[[], object]], None]
    """Do something a moment later, concurrently with the test."""


def patient(endpoint: str | Sequence[str], conf: Mapping[str, str] | None = None) -> EtcdStore:
    """Return a store whose calls have timeouts for a busy machine."""
    return EtcdStore(etcd_options(endpoint, conf), give_up_after_s=PATIENCE_S)


def client_of(store: EtcdStore) -> pyetcd.MultiEndpointEtcd3Client:
    """Return a store's etcd client, for calls that a store does not make; it also has long timeouts."""
    client = store._connection.client()
    client.timeout = PATIENCE_S
    return client


def beside(act: Callable[[], object]) -> None:
    """Act on another thread, a moment later."""
    threading.Timer(0.05, act).start()
