"""Every error that a user can meet, in one tree; each knows the exit code that it ends the process with.

ElasticTrainError               1
├── ConfigError                 2   the configuration, or a task, cannot be used as given
│   └── OtherJobError           2   another job works in the same folder
├── CorruptError               65   data or checkpoints are damaged after every fall-back
│   ├── DataError              65   a dataset is truncated, changed, or lacks a file or a column
│   │   ├── UnreadableError    65   a row group cannot be read, also after trying again
│   │   │   └── AwayError       1   the storage of a dataset does not answer, also after waiting
│   │   └── RowError           65   a row cannot be used, whichever machine reads it
│   ├── CommitError            65   a commit or one of its files does not match its record
│   └── CoverageError          65   an epoch's samples were not applied once each
├── StorageError                1   a save failed (disk full, store unreachable); training continues
├── SavesFailedError            1   too many saves in a row failed; training ends
├── FencedError                 1   a newer world owns the lineage; this one must not publish
├── ResultError                74   done and committed, but the result could not be written
├── UnfinishedError             1   code of a task, or a library, was to end the process before the job was done
├── WeightsDifferError          1   ranks that train together hold different weights
├── PeerLostError               1   a collective failed: a member of the world is gone
├── UnfitError                 71   this machine computes, keeps or writes wrongly: it must not join others
├── NoProgressError            93   world after world ends without a step, or updates are not finite; do not requeue
├── Preempted                  75   asked to leave, committed, requeue
├── HungError                  76   no step in the time allowed
├── TooFewNodesError           77   not enough nodes in time
└── StateLostError             79   parts of the state were lost with other workers: this one begins again

Those that `rendezvous` has as well derive from its own: ConfigError from OptionError, Preempted from StoppedWaiting,
FencedError and TooFewNodesError from their namesakes. `translated` makes them of rendezvous' errors.

A message says what happened, where (file, key, step, term), and what to do.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from rendezvous import errors as rendezvous_errors


class ElasticTrainError(Exception):
    """An error meant for the user; `exit_code` is what the process ends with."""

    exit_code = 1


class ConfigError(ElasticTrainError, rendezvous_errors.OptionError):
    """One or more things in the configuration are wrong; all of them are in `problems`."""

    exit_code = 2


class OtherJobError(ConfigError):
    """Another job, of another run id, works in this job's folder."""


class CorruptError(ElasticTrainError):
    """Data or commits are damaged, and every fall-back was tried."""

    exit_code = 65


class DataError(CorruptError):
    """A dataset cannot be used: the message names the file, the column or the row group, and what to do."""


class UnreadableError(DataError):
    """A row group cannot be read: its file is missing, truncated or damaged; one that changed is a plain DataError."""


class AwayError(UnreadableError):
    """The storage of a dataset does not answer: its data may be whole."""

    exit_code = 1


class RowError(DataError):
    """A row that was read cannot be used: the message names the dataset, the file and the row.

    Any other machine would find the same, so all ranks end with it.
    """


class CommitError(CorruptError):
    """A commit, or a file that it names, does not match its record."""


class CoverageError(CorruptError):
    """At an epoch's end the coverage sums are not those of its samples: one was repeated, or left out."""


class StorageError(ElasticTrainError):
    """A write to the store failed; nothing was published."""


class SavesFailedError(ElasticTrainError):
    """Saves keep failing: what is trained from here on could not be kept."""

    exit_code = StorageError.exit_code


class FencedError(ElasticTrainError, rendezvous_errors.FencedError):
    """A newer term owns the lineage: this world must stop and must not publish."""


class ResultError(ElasticTrainError):
    """The job is done and its last commit exists, but result.json, or what the task's `finish` writes, does not.

    The message says what could not be written and why. Start the job again to write it: no step is trained twice.
    """

    exit_code = 74


class UnfinishedError(ElasticTrainError):
    """Code that the trainer has called was to end the process, with whatever code: the message says where."""


class WeightsDifferError(ElasticTrainError):
    """Ranks of one world hold different weights: the message names the first tensor and the ranks."""


class PeerLostError(ElasticTrainError):
    """A collective failed because a member of the world is gone."""


class UnfitError(ElasticTrainError):
    """This machine fails its health check: the message says which part, what was expected and found, and what to do."""

    exit_code = 71


class NoProgressError(ElasticTrainError):
    """Training cannot get on, and would not if it were started again: the message says at which step, and why."""

    exit_code = 93


class Preempted(ElasticTrainError, rendezvous_errors.StoppedWaiting):  # noqa: N818 - not a failure: the job left as asked
    """The job was asked to leave; what it had applied is committed, or the other members have it.

    Not a failure: start the job again to resume, as a scheduler does that requeues on exit code 75.
    """

    exit_code = 75


class HungError(ElasticTrainError):
    """No step was applied in the time allowed."""

    exit_code = 76


class StateLostError(ElasticTrainError):
    """This process's state is useless: other workers took the rest with them, and there is no commit to load.

    As other workers failed, the agent restarts this process without counting it (`rendezvous.torchelastic.live_agent`).
    """

    exit_code = 79


class TooFewNodesError(ElasticTrainError, rendezvous_errors.TooFewNodesError):
    """Not enough nodes came in the time allowed."""

    exit_code = 77


_KINDS: tuple[tuple[type[rendezvous_errors.RendezvousError], type[ElasticTrainError]], ...] = (
    (rendezvous_errors.NewerVersionError, ConfigError),
    (rendezvous_errors.FencedError, FencedError),
    (rendezvous_errors.TooFewNodesError, TooFewNodesError),
    (rendezvous_errors.StoppedWaiting, Preempted),
    (rendezvous_errors.StoreError, StorageError),
)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise rendezvous' errors as errors of this package, with the same message.

    All ranks and the exit code depend on the kind. An etcd that cannot be used is a StorageError, and what has no kind
    of its own a plain ElasticTrainError.
    """
    try:
        yield
    except ElasticTrainError:
        raise  # it may derive from one of rendezvous' errors
    except rendezvous_errors.OptionError as error:
        raise ConfigError(*error.problems) from error
    except rendezvous_errors.RendezvousError as error:
        kind = next((ours for theirs, ours in _KINDS if isinstance(error, theirs)), ElasticTrainError)
        raise kind(str(error)) from error


def show_uncaught() -> None:
    """Let one of these errors that a script does not catch end it with the error's sentence and exit code.

    Python itself would print a traceback and end with 1, by which no launcher knows a bad configuration from a crash.
    """
    if isinstance(sys.excepthook, _Hook):
        return
    sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """A hook for uncaught exceptions, in front of another one, which a library may have set to report them."""

    def __init__(self, other: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._other = other

    def __call__(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if not isinstance(error, ElasticTrainError):
            if self._other is sys.__excepthook__ and isinstance(error, Exception):
                show(error)
            else:
                self._other(kind, error, where)
            return
        if self._other is not sys.__excepthook__:
            self._other(kind, error, where)
        with contextlib.suppress(OSError):
            sys.stderr.write(explain(error) + "\n")
        if "WORLD_SIZE" in os.environ:  # a stuck collective's thread must not keep the process from leaving
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(error.exit_code)
        raise SystemExit(error.exit_code)


TRACEBACK = "ELASTIC_TRAIN_TRACEBACK"
_NOT_THE_USERS = (
    *(str(Path(__file__).parent.parent / package) + os.sep for package in ("elastic_train", "rendezvous")),
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")),
    "<frozen ",
)


def show(error: BaseException) -> None:
    """Print an unexpected error with the user's own frames, and all below the last of these.

    Frames of the trainer and of libraries that called the user's code are left out, unless no frame is the user's or
    ELASTIC_TRAIN_TRACEBACK is `full`.
    """
    found: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    assert found is not None, "made just now"
    text, num_hidden = found, 0
    while found is not None and os.environ.get(TRACEBACK) != "full":
        num_hidden += _hide_callers(found.stack)
        found = found.__cause__ or found.__context__
    hint = f"({num_hidden} frames outside your code are hidden; {TRACEBACK}=full shows them)\n" if num_hidden else ""
    with contextlib.suppress(OSError):  # standard error may be a closed terminal
        sys.stderr.write("".join(text.format()) + hint)


def _hide_callers(stack: traceback.StackSummary) -> int:
    """Remove the frames before the user's last one that are not the user's; return how many."""
    is_users = [not frame.filename.startswith(_NOT_THE_USERS) for frame in stack]
    last = max((place for place, is_own in enumerate(is_users) if is_own), default=0)
    before = len(stack)
    stack[:last] = [frame for frame, is_own in zip(stack[:last], is_users[:last], strict=True) if is_own]
    return before - len(stack)


def explain(error: ElasticTrainError) -> str:
    """Render an error for a terminal or a log: one line each problem."""
    lines = error.problems if isinstance(error, ConfigError) else [str(error)]
    return "\n".join(f"error: {line}" for line in lines)
