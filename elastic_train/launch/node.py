"""`elastic-train launch`: one node of a job, run by TorchElastic's agents, with exit codes that a scheduler can act on.

torchrun turns every failure and every signal into exit code 1. This launcher forwards SIGTERM, SIGUSR1 and SIGINT to
the workers, waits for them, and exits with one code for all (`exit_codes`). Without an etcd endpoint it starts an etcd
of its own: for a job of one node, or on the first node of a Slurm job for all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator

from elastic_train.errors import ElasticTrainError, TooFewNodesError, translated
from elastic_train.launch.exit_codes import exit_code
from elastic_train.launch.options import Launch
from elastic_train.system.preemption import EXIT_AT_ONCE, GRACE_VARIABLE, SAME_REQUEST_S

ETCD_PORTS = range(20_000, 30_000)
"""Where the first node of a job starts the job's etcd; which of them follows from the run id."""
ETCD_PATIENCE_S = 15.0
"""How long other nodes wait for it before they see for themselves."""
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def launch(plan: Launch) -> int:
    """Run this node until its workers have ended; return the exit code.

    Raises ConfigError for options that the rendezvous refuses, TooFewNodesError, and ElasticTrainError for its other
    errors: no etcd answers, or none can be started.
    """
    # torch takes seconds to import: not before the arguments are read
    from torch.distributed.elastic.rendezvous import RendezvousError as TorchRendezvousError

    try:
        with translated(), _etcd(plan) as endpoint:
            return _run_agent(plan, endpoint)
    except TorchRendezvousError as error:
        raise ElasticTrainError(str(error)) from error


@contextlib.contextmanager
def _etcd(plan: Launch) -> Iterator[str]:
    """Yield the endpoint of the job's etcd; start one here if the job has none.

    Several jobs may have the same first node: each has a port of its own by its run id, and no job uses another's etcd.
    """
    if plan.endpoint is not None:
        yield plan.endpoint
        return
    from rendezvous.etcd.server import EtcdServer, refuse_other_etcd

    digest = hashlib.sha256(plan.run_id.encode()).hexdigest()
    name, port = f"job-{digest[:12]}", ETCD_PORTS[int(digest, 16) % len(ETCD_PORTS)]
    if plan.max_nodes == 1:
        with EtcdServer() as server:
            yield server.endpoint
    elif plan.is_etcd_host:
        with EtcdServer(port=port, host="0.0.0.0", name=name):
            yield f"{socket.gethostname()}:{port}"
    else:
        endpoint = f"{plan.etcd_address}:{port}"
        refuse_other_etcd(endpoint, name, ETCD_PATIENCE_S)
        yield endpoint


def _run_agent(plan: Launch, endpoint: str) -> int:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters, RendezvousTimeoutError

    from rendezvous.torchelastic.bound_agent import BoundAgent
    from rendezvous.torchelastic.entry_point import create_handler, make_agent

    parameters = RendezvousParameters(
        backend="etcd",
        endpoint=endpoint,
        run_id=plan.run_id,
        min_nodes=plan.min_nodes,
        max_nodes=plan.max_nodes,
        local_addr=plan.local_addr,
        recovery=plan.recovery,
        ttl=plan.ttl_s,
        compact=plan.compact,
    )
    handler = create_handler(parameters)
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
    agent = make_agent(spec, logs_specs=DefaultLogsSpecs(), start_method="spawn", shutdown_timeout=int(plan.grace_s))
    assert isinstance(agent, BoundAgent), "our handlers have our agents"
    has_failed = is_asked = False
    with _signals(SignalException):
        try:
            has_failed = agent.run().is_failed()
        except SignalException:
            is_asked = True
        except RendezvousTimeoutError as error:
            raise TooFewNodesError(str(error)) from error
        except RendezvousError as error:
            sys.stderr.write(f"error: {error}\n")
            has_failed = True
        finally:
            handler.shutdown()
    return exit_code(agent.worker_codes(), has_failed=has_failed, is_asked=is_asked)


@contextlib.contextmanager
def _signals(kind: type[Exception]) -> Iterator[None]:
    """Raise `kind`, with the signal in it, where the agent waits; a second signal, seconds later, exits at once."""
    since_s: list[float] = []

    def note(number: int, frame: object) -> None:
        since_s.append(time.monotonic())
        if len(since_s) > 1:
            if since_s[-1] - since_s[0] > SAME_REQUEST_S:
                os._exit(EXIT_AT_ONCE)  # the workers die with it
            return
        raise kind(f"asked to leave by {signal.Signals(number).name}", signal.SIGTERM)

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
