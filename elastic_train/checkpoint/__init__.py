"""Commits: published checkpoints, their stores, and how they are written, found, read and kept."""

from elastic_train.checkpoint.flight import Ended
from elastic_train.checkpoint.markers import holding
from elastic_train.checkpoint.policies import Retention
from elastic_train.checkpoint.reader import Discovery, discover, load, read_state, verify
from elastic_train.checkpoint.record import CommitFacts, CommitRecord
from elastic_train.checkpoint.retention import prune
from elastic_train.checkpoint.saves import Role, SaveMemory, Saves
from elastic_train.checkpoint.stores import Entry, Store, open_store
from elastic_train.checkpoint.sweeping import sweep
from elastic_train.checkpoint.writer import CommitWriter, Unheard

__all__ = [
    "CommitFacts",
    "CommitRecord",
    "CommitWriter",
    "Discovery",
    "Ended",
    "Entry",
    "Retention",
    "Role",
    "SaveMemory",
    "Saves",
    "Store",
    "Unheard",
    "discover",
    "holding",
    "load",
    "open_store",
    "prune",
    "read_state",
    "sweep",
    "verify",
]
