"""Entry points of training: `train` for programs, `run` for the command; both use the one supervisor.

The command's errors all end here, as a message and an exit code.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from elastic_train.config import sources
from elastic_train.config.schema import Config
from elastic_train.data.worker_failures import refuse_unguarded
from elastic_train.errors import ElasticTrainError, OtherJobError, Preempted, UnfinishedError, explain, show
from elastic_train.system.preemption import LeaveRequest, launched_grace_s
from elastic_train.tracking.history import note_failed
from elastic_train.tracking.progress import flush_streams
from elastic_train.training.result import TrainResult
from elastic_train.training.supervisor import Ended, HowFar, supervise
from rendezvous import reverse_lookups
from rendezvous.agent.worker_end import announce, declare_finished, release
from rendezvous.errors import RendezvousError
from rendezvous.orphans import die_with_parent

TURN_S = 1e-4
"""Seconds after which a thread must yield the interpreter to the training thread, e.g. after torch operations.

With Python's default of 5 ms, a step takes three times as long while another thread imports a tracker.
"""


def train(config: Config | str | Path) -> TrainResult:
    """Train like `elastic-train train`, or resume from the newest valid commit in `run.dir`; return the result.

    `config` is a checked configuration (`load_config`) or the path of a YAML file, which the environment's
    ELASTIC_TRAIN__* variables override.

    The result is equal on every rank. `run.dir` has it in result.json, and the weights in its commits (`discover`,
    `read_state`).

    Call it in the main thread: until it returns, SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 ask it to commit and
    leave at the next step, and a second Ctrl-C, or a second SIGTERM more than 3 s later, ends the process at once. It
    sets torch's thread count, Python's switch interval and, unless `reduction: fast`, torch's deterministic mode for
    the whole process, permanently.

    Under torchrun call it on every rank, before any process group is made: it joins the world by itself, and with
    `recovery=live` one world after another. End such a process as the command does: flush, then `os._exit(0)`, or
    `os._exit(error.exit_code)`, which tells the launcher if the process left or failed. A thread stuck in a collective
    or a call to etcd would delay or abort a normal exit of the interpreter.

    Raises ElasticTrainError: ConfigError, DataError before the first step; StorageError if commits cannot be written;
    Preempted (exit code 75) if asked to leave, after the state is committed or the other members have it: call it again
    to resume; ResultError if the job is done and committed but result.json could not be written. Raises ValueError
    outside the main thread.
    """
    refuse_unguarded()
    started_at = time.time()
    leave = _begin()
    try:
        checked = config if isinstance(config, Config) else sources.load_config(config)
        ended = _supervised(checked, leave, started_at)
    except ElasticTrainError:
        raise  # it may derive from one of rendezvous' errors
    except RendezvousError as error:
        raise ElasticTrainError(str(error)) from error
    finally:
        flush_streams()
        if not (leave.is_set and _is_launched()):  # an agent may forward a signal that the process already has
            leave.release()
    if isinstance(ended, ElasticTrainError):
        raise ended
    return ended


def run(path: Path, overrides: Sequence[str]) -> int:
    """Train as configured and return the process's exit code; under torchrun, as one of its ranks."""
    started_at = time.time()
    leave = _begin()
    try:
        config = sources.load(path, environ=os.environ, arguments=overrides)
        if os.environ.get("RANK", "0") == "0":
            for line in sources.given_twice(overrides):
                _say(line)
        ended = _supervised(config, leave, started_at)
        code = ended.exit_code if isinstance(ended, ElasticTrainError) else 0
        if isinstance(ended, Preempted) and os.environ.get("LOCAL_RANK", "0") == "0":
            _say(f"{ended}")
    except ElasticTrainError as error:
        _say(explain(error))
        code = error.exit_code
    except RendezvousError as error:
        _say(f"error: {error}")
        code = 1
    except Exception as error:  # noqa: BLE001 - last resort: an unexpected error must be shown and end the process
        show(error)
        code = 1
    flush_streams()
    leave.hear_no_more()
    if _is_launched():
        os._exit(code)  # a stuck collective's thread must not keep the process alive
    return code


def _say(text: str) -> None:
    """Write a line to standard error, which may be a closed terminal."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _supervised(config: Config, leave: LeaveRequest, started_at: float) -> Ended:
    """Train to the end, and declare the work finished if the job is done.

    Until then a normal exit counts as failure.
    """
    config, how_far = config.anchored(), HowFar()
    announce(how_far.__str__)
    try:
        ended = _ended(config, leave, started_at, how_far)
        if isinstance(ended, TrainResult):
            declare_finished()
    except Exception as error:
        if not isinstance(error, Preempted | OtherJobError):  # the folder belongs to another job
            _note(error, config, how_far, started_at)
        raise
    finally:
        release()
    return ended


def _ended(config: Config, leave: LeaveRequest, started_at: float, how_far: HowFar) -> Ended:
    try:
        return supervise(config, leave, started_at, how_far)
    except SystemExit as error:
        raise UnfinishedError(
            f"the process was to end with {error.code!r} {how_far} without finishing, by sys.exit, quit or SystemExit "
            f"in {_place_of(error)}: let that code raise an error, or return"
        ) from error


def _note(error: Exception, config: Config, how_far: HowFar, started_at: float) -> None:
    """Record in the run's folder why this process ends, so that `status` shows it without logs."""
    is_own = isinstance(error, ElasticTrainError | RendezvousError)
    why = str(error) if is_own else f"{type(error).__name__}: {error} ({_place_of(error)})"
    code = error.exit_code if isinstance(error, ElasticTrainError) else 1
    kind = type(error).__name__
    note_failed(config.run.dir, exit_code=code, step=how_far.step, kind=kind, why=why, started_at=started_at)


def _place_of(error: BaseException) -> str:
    """Return the location where an error was raised, outside Python's own code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "_sitebuiltins" not in frame.filename]
    return f"{frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name}"


def _begin() -> LeaveRequest:
    """Tie a launched process to its launcher, listen for requests to leave, and shorten threads' switch interval."""
    sys.setswitchinterval(TURN_S)
    if _is_launched():
        die_with_parent()
        reverse_lookups.switch_off()
    return LeaveRequest(launched_grace_s())


def _is_launched() -> bool:
    return "WORLD_SIZE" in os.environ
