"""One store for a whole job: a node that does not see the store of the job's commits is rejected.

A store gets a unique word when a world first uses it, under a key that is never deleted, and etcd names the word of the
job's store. With folders on local disks, or a missing mount, each node would see its own store: the leader would
continue from its own, and the job would have two lineages.

A process checks before it becomes a member, so a node with a wrong store costs the others nothing; and again in every
world, because mounts may fail. In a job's first world all ranks check at once: the job's store is the one that most of
them see, and the other ranks are rejected.

A copy of a store (rsync, a machine image, a mounted snapshot) has the same word. So in every world each rank also looks
for rank 0's latest claim, whose nonce is newer than any copy.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import DeadlineStore, KeyMissing, KeyTaken, Store, create_once, read
from elastic_train.config.schema import Config
from elastic_train.errors import ConfigError, StorageError
from elastic_train.parallel.group import Group
from elastic_train.system.file_systems import mount_of
from elastic_train.world.claims import has_claim, term_key

log = logging.getLogger(__name__)
KEY = "store-id"
LOCAL_PATIENCE_S, REMOTE_PATIENCE_S = 1.0, 20.0
"""Seconds that an existing word may stay invisible: a local file system shows it at once, a network's may lag."""
LEADER_S = 3.0
"""Additional seconds to wait for rank 0's claim: if its own store is the wrong one, it has ended by then."""
LOOK_S = 0.2
_DIGITS = 15
"""Hexadecimal digits of a word: as many as fit into a tensor's integer."""


def identity_of(store: Store) -> str | None:
    """Return a store's word, None if none is visible."""
    try:
        return read(store, KEY).decode(errors="replace").strip()
    except KeyMissing:
        return None


def identify(store: Store) -> str:
    """Return a store's word, creating it if there is none; raise ConfigError if it can be created twice."""
    known = identity_of(store)
    if known is not None:
        return known
    word = uuid.uuid4().hex[:_DIGITS]
    if create_once(store, KEY, word.encode()):
        _create_again(store, word)
        return word
    known = identity_of(store)
    if known is None:
        raise StorageError(f"{store.url}/{KEY}: another process has created it, and it cannot be read yet")
    return known


def proves_itself(store: Store, word: str) -> bool:
    """Return True if the store has the word and refuses to create an existing key; False if it does not answer.

    Raises ConfigError if it creates the key again, because two worlds could then both publish: some S3-compatible
    stores ignore `If-None-Match`. The content written is the existing one.
    """
    try:
        return identity_of(store) == word and _create_again(store, word)
    except StorageError:
        return False


def _create_again(store: Store, word: str) -> bool:
    """Return True if a store refuses to create its word's key again, False if it does not answer."""
    try:
        store.create(KEY, word.encode())
    except KeyTaken:
        return True
    except StorageError:
        return False
    raise ConfigError(
        f"{store.url} ignores that a key is to be created only if it does not exist (it created {KEY} twice), so two "
        "worlds could both publish. Use an object store that honours If-None-Match on PUT, or a shared folder"
    )


def choose(group: Group, store: Store) -> tuple[str | None, bool]:
    """Return the word of the store that most ranks see, in a job's first world, and True if this rank sees it.

    A rank whose store does not answer has no vote. The word is None if no store answers. Raises ConfigError on ranks
    that see another store.
    """
    try:
        mine: str | None = identify(store)
    except StorageError:
        mine = None
    seen = group.all_gather(torch.tensor(_number(mine))).tolist()
    votes = Counter(number for number in seen if number)
    if not votes:
        return None, False
    chosen = f"{votes.most_common(1)[0][0]:0{_DIGITS}x}"  # on a tie, that of the lowest rank
    if mine is not None and mine != chosen:
        raise ConfigError(_refusal(store, mine))
    return chosen, mine is not None


def _number(word: str | None) -> int:
    try:
        return int((word or "0")[:_DIGITS], 16)
    except ValueError:
        return 0


@dataclass(frozen=True, slots=True)
class Claimed:
    """The term that rank 0 has just claimed in its store, and the claim's nonce."""

    term: int
    nonce: str


def check(
    store: Store,
    word: str,
    still: Callable[[float], None] = lambda waited_s: None,
    claimed: Claimed | None = None,
) -> None:
    """Return if a store has the word and, if given, rank 0's claim; raise ConfigError otherwise.

    Waits for what is not visible yet; `still` is called with the seconds waited, and may raise. Raises StorageError if
    the store does not answer.
    """
    started = time.monotonic()
    while claimed is None or not has_claim(store, claimed.term, claimed.nonce):
        seen = identity_of(store)
        if claimed is None and seen == word:
            return
        waited_s, patience_s = time.monotonic() - started, _patience_s(store.url) + (LEADER_S if claimed else 0.0)
        if seen not in (None, word) or waited_s > patience_s:
            raise ConfigError(_refusal(store, seen, claimed if seen == word else None))
        still(waited_s)
        time.sleep(LOOK_S)


def check_first(
    store: Store,
    word: str,
    still: Callable[[float], None] = lambda waited_s: None,
    claimed: Claimed | None = None,
) -> None:
    """Check a rank's store in a job's first world, in which all ranks have seen one word."""
    check(store, word, still, claimed)


def mend(store: Store, word: str) -> bool:
    """Restore a store's lost word; return False if it has another.

    Only for processes that have trained with this store, at this path: the folder was deleted or moved meanwhile.
    """
    if identity_of(store) is not None or not create_once(store, KEY, word.encode()):
        return False
    log.warning(
        "%s has lost its %s, and probably all commits, since this job began: it is written again, and the next commit "
        "is complete. Was the folder deleted, moved or cleaned?",
        *(store.url, KEY),
    )
    return True


def check_before_joining(config: Config, word: str | None, on_progress: Callable[[], None]) -> None:
    """Check this node's store before it joins; does nothing if the job has none yet, or it does not answer."""
    if word is None:
        return
    try:
        check(DeadlineStore(open_store(config.checkpoint_url), on_progress), word)
    except StorageError:
        return  # the world waits for it and logs it


def _patience_s(url: str) -> float:
    mount = None if "://" in url else mount_of(url)
    return LOCAL_PATIENCE_S if mount is not None and mount.is_local else REMOTE_PATIENCE_S


def _refusal(store: Store, seen: str | None, claimed: Claimed | None = None) -> str:
    mount = None if "://" in store.url else mount_of(store.url)
    where = f"{store.url} ({mount.kind}, mounted at {mount.point})" if mount else store.url
    what = f"it has no {KEY}" if seen is None else f"it has another {KEY}"
    if claimed is not None:
        what = (
            f"it has the same {KEY}, but not {term_key(claimed.term)}, which rank 0 has just written, so it is a copy "
            "or an old view of that folder"
        )
    return (
        f"{where} is not where this job keeps its commits: {what}. All nodes must see one store: set run.dir or "
        "checkpoint.url to a folder that all of them mount, or to an object store, and check that it is mounted here. "
        "To begin another job in this store, give it a run id of its own"
    )
