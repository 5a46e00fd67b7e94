"""Open a store by its URL: the one place that knows every kind of store."""

from __future__ import annotations

from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.node_copy import NodeCopyStore
from elastic_train.checkpoint.stores.store import Store


def open_store(url: str, near_dir: str | None = None) -> Store:
    """Open the store of a run's commits: at a folder, a `file://` URL, or any fsspec URL (`s3://bucket/run`).

    Nothing is created before the first write. With `near_dir`, a folder on this node (best on tmpfs), saved files are
    also copied there, and commits are loaded from copies that match their checksums.

    Raise ConfigError if the URL's protocol is unknown, or its package is not installed. The store's methods raise
    StorageError if the medium fails, and block as long as the medium does.
    """
    store = _open(url)
    return NodeCopyStore(store, near_dir) if near_dir else store


def _open(url: str) -> Store:
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalStore(url)
    if scheme in ("file", "local"):
        return LocalStore(rest)
    from elastic_train.checkpoint.stores.fsspec_store import FsspecStore  # fsspec is imported for URLs only

    return FsspecStore(url)
