"""`elastic-train launch`: one node of a job, run by TorchElastic's agents, with exit codes for schedulers.

torchrun turns every failure and signal into exit code 1. This launcher answers SIGTERM, SIGINT, SIGHUP and SIGUSR1 by
asking the workers to leave, waits for them, and exits with one code for all. Without an etcd endpoint it starts an
etcd: for a job of one node, or on the first node of a scheduler's job for all of them (`job_etcd`).

The workers' exit codes are combined into the node's, which a scheduler can act on (codes are in errors.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from elastic_train.errors import (
    ConfigError,
    CorruptError,
    ElasticTrainError,
    HungError,
    NoProgressError,
    Preempted,
    ResultError,
    TooFewNodesError,
    UnfitError,
    translated,
)
from elastic_train.launch import departure
from elastic_train.launch.departure import REQUESTS
from elastic_train.launch.job_etcd import JobEtcd, job_etcd
from elastic_train.launch.options import Launch
from elastic_train.system.preemption import GRACE_VARIABLE, tell

if TYPE_CHECKING:
    from rendezvous.torchelastic.bound_agent import BoundAgent

LAST_WORDS_S = 2.0
"""Seconds for workers that must end at once to report what is lost."""

TELLING_CODES = (
    CorruptError.exit_code,
    ConfigError.exit_code,
    UnfitError.exit_code,
    NoProgressError.exit_code,
    HungError.exit_code,
    TooFewNodesError.exit_code,
    ResultError.exit_code,
)
"""Codes more informative than plain failure, most specific first."""


def launch(plan: Launch, run_dir: str) -> int:
    """Run this node until its workers have ended; return the exit code. A failure of its own is noted in the run.

    Raise ConfigError for options that the rendezvous rejects, TooFewNodesError, and ElasticTrainError otherwise: no
    etcd answers, or none can be started.
    """
    started_at = time.time()
    try:
        return _launch(plan)
    except Preempted:
        raise
    except ElasticTrainError as error:
        from elastic_train.tracking.history import note_failed

        why, kind = str(error), type(error).__name__
        note_failed(
            run_dir, exit_code=error.exit_code, step=0, kind=kind, why=why, started_at=started_at, is_launcher=True
        )
        raise


def _launch(plan: Launch) -> int:
    for warning in plan.warnings:
        say(f"warning: {warning}\n")
    # torch takes seconds to import: not before the arguments are checked
    from torch.distributed.elastic.rendezvous import RendezvousError as TorchRendezvousError

    with departure.raising(departure.asked_by):
        try:
            with translated(), job_etcd(plan) as etcd:
                return _run_agent(plan, etcd)
        except departure.AskedToLeave as asked:
            say(f"{asked} before any worker was started\n")
            return Preempted.exit_code
        except TorchRendezvousError as error:
            raise ElasticTrainError(str(error)) from error


def say(text: str) -> None:
    """Write a line to standard error, which may be a closed terminal."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _asked_to_leave(grace_s: float, number: int) -> BaseException:
    """Say that a signal asks the workers to leave; return the exception that ends the agent."""
    from torch.distributed.elastic.multiprocessing import SignalException

    name = signal.Signals(number).name
    again = ", Ctrl-C again ends them at once" if number == signal.SIGINT else ""
    tell(f"asked to leave by {name}: the workers have {grace_s:g} s to commit{again}")
    return SignalException(f"asked to leave by {name}", signal.SIGTERM)


def _end_workers(agent: BoundAgent, number: int) -> str:
    """End the workers at once; return what is lost."""
    is_heard = agent.end_at_once(number, LAST_WORDS_S)
    return "its workers have said above what is lost" if is_heard else "steps since the newest commit are lost"


def _run_agent(plan: Launch, etcd: JobEtcd) -> int:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters, RendezvousTimeoutError

    from rendezvous.torchelastic.bound_agent import BoundAgent
    from rendezvous.torchelastic.entry_point import create_handler, make_agent

    parameters = RendezvousParameters(
        backend="etcd",
        endpoint=etcd.endpoint,
        run_id=plan.run_id,
        min_nodes=plan.min_nodes,
        max_nodes=plan.max_nodes,
        local_addr=plan.local_addr,
        **plan.rendezvous_options(),
    )
    handler = create_handler(parameters)
    etcd.keep()
    has_failed = is_asked = False
    codes: list[int] = []
    # TorchElastic leaves a folder behind for each launch
    with tempfile.TemporaryDirectory(prefix="elastic-train-", ignore_cleanup_errors=True) as folder:
        try:
            os.environ[GRACE_VARIABLE] = str(plan.grace_s)  # inherited by the workers
            spec = WorkerSpec(
                role="default",
                local_world_size=plan.ranks,
                entrypoint=sys.executable,
                args=tuple(plan.arguments()),
                rdzv_handler=handler,
                max_restarts=plan.max_restarts,
                monitor_interval=0.05,
            )
            logs = DefaultLogsSpecs(log_dir=folder)
            agent = make_agent(spec, logs_specs=logs, start_method="spawn", shutdown_timeout=int(plan.grace_s))
            assert isinstance(agent, BoundAgent), "our handlers have our agents"
            end_workers = functools.partial(_end_workers, agent)
            with departure.raising(functools.partial(_asked_to_leave, plan.grace_s), end_workers):
                try:
                    has_failed = agent.run().is_failed()
                except SignalException:
                    is_asked = True
                finally:
                    codes = agent.worker_codes()
        except RendezvousTimeoutError as error:
            raise TooFewNodesError(str(error)) from error
        except RendezvousError as error:
            say(f"error: {error}\n")
            has_failed = True
        finally:
            handler.shutdown()
    if is_asked and (num_killed := outstayed(codes)):
        say(
            f"{num_killed} of {plan.ranks} workers had not left after {plan.grace_s:g} s (--grace-s) and were killed: "
            "the next start continues from the newest commit\n"
        )
    return exit_code(codes, has_failed=has_failed, is_asked=is_asked)


def exit_code(codes: Sequence[int], *, has_failed: bool, is_asked: bool = False) -> int:
    """Return the node's exit code: its workers' most specific one; 75 if all left cleanly and some early; else 0 or 1.

    `is_asked`: this node was asked to leave. A worker killed by the same signal had no handler yet and held no state,
    so it counts as preempted; so does a node without workers, and one killed at the end of its grace period: the next
    start continues from a commit, and schedulers restart only for 75.
    """
    if is_asked:
        by_request = [-number for number in (*REQUESTS, signal.SIGKILL)]
        codes = [Preempted.exit_code if code in by_request else code for code in codes] or [Preempted.exit_code]
    telling = next((code for code in TELLING_CODES if code in codes), None)
    if telling is not None:
        return telling
    if Preempted.exit_code in codes and set(codes) <= {0, Preempted.exit_code}:
        return Preempted.exit_code
    return int(has_failed or any(codes))


def outstayed(codes: Sequence[int]) -> int:
    """Return how many workers were still running when the grace period of a leaving node ended."""
    return sum(code == -signal.SIGKILL for code in codes)
