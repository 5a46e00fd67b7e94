"""Opening a store by its URL: the one place that knows every kind of store."""

from __future__ import annotations

from collections.abc import Callable

from elastic_train.checkpoint.stores.deadline import PromptStore
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.node_copy import NearStore
from elastic_train.checkpoint.stores.store import Store


def open_store(url: str, near_dir: str | None = None, *, heard: Callable[[], None] | None = None) -> Store:
    """Open the store at a folder or an fsspec URL; ConfigError if nothing here can speak its protocol.

    With `near_dir`, a folder on this node, what is written is also kept there, and read from there if it matches. With
    `heard`, no short call is waited for without end (StorageError), and all that the store does is heard.
    """
    store = _open(url)
    store = NearStore(store, near_dir) if near_dir else store
    return PromptStore(store, heard) if heard else store


def _open(url: str) -> Store:
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalStore(url)
    if scheme in ("file", "local"):
        return LocalStore(rest)
    from elastic_train.checkpoint.stores.fsspec_store import FsspecStore  # fsspec is imported for URLs only

    return FsspecStore(url)
