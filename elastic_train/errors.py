"""Every error that a user can meet, in one tree; each knows the exit code that it ends the process with.

ElasticTrainError               1
├── ConfigError                 2   the configuration, or a task, cannot be used as given
├── CorruptError               65   data or checkpoints are damaged after every fall-back
│   ├── DataError              65   a dataset is missing, truncated, changed, or lacks a column
│   │   └── UnreadableError    65   a row group cannot be read, also after trying again
│   └── CommitError            65   a commit or one of its files does not match its record
├── StorageError                1   a save failed (disk full, store unreachable); training continues
├── SavesFailedError            1   too many saves in a row failed; training ends
├── FencedError                 1   a newer world owns the lineage; this one must not publish
├── ResultError                74   done and committed, but the result could not be written
├── PeerLostError               1   a collective failed: a member of the world is gone
├── Preempted                  75   asked to leave, committed, requeue
├── HungError                  76   no step in the time allowed
├── TooFewNodesError           77   not enough nodes in time

A message says what happened, where (file, key, step, term), and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class ElasticTrainError(Exception):
    """An error meant for the user; `exit_code` is what the process ends with."""

    exit_code = 1


class ConfigError(ElasticTrainError):
    """One or more things in the configuration are wrong; all of them are in `problems`."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        self.problems: Sequence[str] = problems
        super().__init__("\n".join(problems))


class CorruptError(ElasticTrainError):
    exit_code = 65


class DataError(CorruptError):
    """A dataset cannot be used: the message names the file, the column or the row group, and what to do."""


class UnreadableError(DataError):
    """A row group cannot be read: its file is missing, truncated or damaged; one that changed is a plain DataError."""


class CommitError(CorruptError):
    """A commit, or a file that it names, does not match its record."""


class StorageError(ElasticTrainError):
    """A write to the store failed; nothing was published."""


class SavesFailedError(ElasticTrainError):
    """Saves keep failing: what is trained from here on could not be kept."""

    exit_code = StorageError.exit_code


class FencedError(ElasticTrainError):
    """A newer term owns the lineage: this world must stop and must not publish."""


class ResultError(ElasticTrainError):
    """The job is done and its last commit exists; what it leaves beside could not be written."""

    exit_code = 74


class PeerLostError(ElasticTrainError):
    """A collective failed because a member of the world is gone."""


class Preempted(ElasticTrainError):  # noqa: N818 - not a failure: the job left because it was asked to
    """The job was asked to leave; its applied state is committed."""

    exit_code = 75


class HungError(ElasticTrainError):
    exit_code = 76


class TooFewNodesError(ElasticTrainError):
    exit_code = 77


def explain(error: ElasticTrainError) -> str:
    """Render an error for a terminal or a log: one line each problem."""
    lines = error.problems if isinstance(error, ConfigError) else [str(error)]
    return "\n".join(f"error: {line}" for line in lines)
