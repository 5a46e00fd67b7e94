"""Commits: published checkpoints, their stores, and how they are written, found, read and kept."""

from elastic_train.checkpoint.commits.pruning import prune, sweep
from elastic_train.checkpoint.commits.reader import (
    Discovery,
    discover,
    load,
    read_state,
    verify,
)
from elastic_train.checkpoint.commits.record import CommitFacts, CommitRecord
from elastic_train.checkpoint.commits.retention_policies import Retention, holding
from elastic_train.checkpoint.commits.writer import CommitWriter, FenceNotUpdated
from elastic_train.checkpoint.saving.background_saves import Role, SaveMemory, Saves
from elastic_train.checkpoint.saving.save_thread import SaveOutcome
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import Entry, Store

__all__ = [
    "CommitFacts",
    "CommitRecord",
    "CommitWriter",
    "Discovery",
    "Entry",
    "FenceNotUpdated",
    "Retention",
    "Role",
    "SaveMemory",
    "SaveOutcome",
    "Saves",
    "Store",
    "discover",
    "holding",
    "load",
    "open_store",
    "prune",
    "read_state",
    "sweep",
    "verify",
]
