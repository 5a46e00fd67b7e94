"""`elastic-train launch`: one node of a job, run by TorchElastic's agents, with exit codes that a scheduler can act on.

torchrun turns every failure and every signal into exit code 1. This launcher forwards SIGTERM, SIGUSR1 and SIGINT to
the workers, waits for them, and exits with one code for all (`exit_codes`). Without an etcd endpoint it starts an etcd
of its own: for a job of one node, or on the first node of a scheduler's job for all of them (`job_etcd`).
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile

from elastic_train.errors import ElasticTrainError, Preempted, TooFewNodesError, translated
from elastic_train.launch import departure
from elastic_train.launch.exit_codes import exit_code, outstayed
from elastic_train.launch.job_etcd import JobEtcd, job_etcd
from elastic_train.launch.options import Launch
from elastic_train.system.preemption import GRACE_VARIABLE


def launch(plan: Launch) -> int:
    """Run this node until its workers have ended; return the exit code.

    Raises ConfigError for options that the rendezvous refuses, TooFewNodesError, and ElasticTrainError for its other
    errors: no etcd answers, or none can be started.
    """
    for warning in plan.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    # torch takes seconds to import: not before the arguments are read
    from torch.distributed.elastic.rendezvous import RendezvousError as TorchRendezvousError

    with departure.raising(departure.AskedToLeave):
        try:
            with translated(), job_etcd(plan) as etcd:
                return _run_agent(plan, etcd)
        except departure.AskedToLeave as asked:
            sys.stderr.write(f"{asked} before any worker was started\n")
            return Preempted.exit_code
        except TorchRendezvousError as error:
            raise ElasticTrainError(str(error)) from error


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
    # TorchElastic makes a folder for each launch, and leaves it
    with tempfile.TemporaryDirectory(prefix="elastic-train-", ignore_cleanup_errors=True) as folder:
        try:
            os.environ[GRACE_VARIABLE] = str(plan.grace_s)  # which the workers inherit
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
            with departure.raising(lambda why: SignalException(why, signal.SIGTERM)):
                try:
                    has_failed = agent.run().is_failed()
                except SignalException:
                    is_asked = True
                finally:
                    codes = agent.worker_codes()
        except RendezvousTimeoutError as error:
            raise TooFewNodesError(str(error)) from error
        except RendezvousError as error:
            sys.stderr.write(f"error: {error}\n")
            has_failed = True
        finally:
            handler.shutdown()
    if is_asked and (num_killed := outstayed(codes)):
        sys.stderr.write(
            f"{num_killed} of {plan.ranks} workers had not left after {plan.grace_s:g} s (--grace-s) and were killed: "
            "the next start continues from the newest commit\n"
        )
    return exit_code(codes, has_failed=has_failed, is_asked=is_asked)
