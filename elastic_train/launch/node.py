"""`elastic-train launch`: one node of a job, over TorchElastic's agents, with exit codes that a scheduler can act on.

torchrun turns every failure and every signal into 1. This launcher forwards SIGTERM, SIGUSR1 and SIGINT to the workers,
waits for them, and ends with the code that they agree on (see errors.py). What is not said on the command line comes
from the environment: torchrun's own PET_* variables (Kubernetes operators set them), then Slurm's. Without an etcd
endpoint it starts an etcd of its own, for a job of one node, or on a Slurm job's first node for all of them.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_train.errors import ConfigError, ElasticTrainError, Preempted, TooFewNodesError, translated
from elastic_train.system.preemption import EXIT_AT_ONCE, SAME_REQUEST_S

RECOVERIES = ("live", "restart")
ETCD_PORT = 23790
# Codes that say more than "a failure", the most telling first.
TELLING_CODES = (65, 2, 76, 77, 74)
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Launch:
    """How one node of a job is started; `endpoint` None: this job needs an etcd of its own."""

    config: Path
    overrides: tuple[str, ...]
    min_nodes: int
    max_nodes: int
    ranks: int
    run_id: str
    endpoint: str | None
    recovery: str
    max_restarts: int
    ttl_s: float
    grace_s: float
    is_etcd_host: bool = True
    etcd_address: str = "127.0.0.1"

    def arguments(self) -> list[str]:
        """Return the command line of a worker, after the interpreter."""
        return ["-m", "elastic_train", str(self.config), *self.overrides]


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line says; None where it says nothing."""

    nodes: str | None = None
    ranks: int | None = None
    endpoint: str | None = None
    run_id: str | None = None
    recovery: str = "live"
    max_restarts: int = 100
    ttl_s: float = 3.0
    grace_s: float = 30.0


def resolve(config: Path, overrides: Sequence[str], flags: Flags, environ: Mapping[str, str], num_gpus: int) -> Launch:
    """Fill in what the flags leave open; raise ConfigError with everything that is wrong."""
    problems: list[str] = []
    slurm_nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES")
    nodes = flags.nodes or environ.get("PET_NNODES") or slurm_nodes or "1"
    least, most = _nodes(nodes, problems)
    ranks = flags.ranks
    if ranks is None:
        ranks = _count(environ, "PET_NPROC_PER_NODE", problems) or max(1, num_gpus)
    problems += _wrong_numbers(flags)
    endpoint = flags.endpoint or environ.get("PET_RDZV_ENDPOINT") or None
    run_id = flags.run_id or environ.get("PET_RDZV_ID") or environ.get("SLURM_JOB_ID")
    if flags.recovery not in RECOVERIES:
        problems.append(f"--recovery must be one of {', '.join(RECOVERIES)}, not {flags.recovery!r}")
    is_slurm = slurm_nodes is not None and "SLURM_JOB_NODELIST" in environ
    if most > 1 and endpoint is None and not is_slurm:
        problems.append(
            "--endpoint HOST:PORT of an etcd is needed for several nodes (PET_RDZV_ENDPOINT, outside Slurm)"
        )
    if most > 1 and run_id is None:
        problems.append("--id NAME is needed for several nodes: all of them must give the same")
    if problems:
        raise ConfigError(*problems)
    shared = most > 1 and endpoint is None
    return Launch(
        config=config,
        overrides=tuple(overrides),
        min_nodes=least,
        max_nodes=most,
        ranks=ranks,
        run_id=run_id or uuid.uuid4().hex[:12],
        endpoint=endpoint,
        recovery=flags.recovery,
        max_restarts=flags.max_restarts,
        ttl_s=flags.ttl_s,
        grace_s=flags.grace_s,
        is_etcd_host=not shared or environ.get("SLURM_NODEID", "0") == "0",
        etcd_address=first_host(environ["SLURM_JOB_NODELIST"]) if shared else "127.0.0.1",
    )


def launch(plan: Launch) -> int:
    """Run this node until its workers have ended; return the exit code.

    Raises ConfigError where the rendezvous refuses its options, TooFewNodesError, and ElasticTrainError for the rest of
    its errors: no etcd answers, or none can be started.
    """
    # torch takes seconds to import: not before the arguments are read
    from torch.distributed.elastic.rendezvous import RendezvousError as TorchRendezvousError

    try:
        with translated(), _etcd(plan) as endpoint:
            return _run_agent(plan, endpoint)
    except TorchRendezvousError as error:
        raise ElasticTrainError(str(error)) from error


def exit_code(codes: Sequence[int], *, has_failed: bool, is_told: bool = False) -> int:
    """Return what the workers' codes amount to: the most telling one; preempted if all left well, and some early.

    `is_told`: this node was told to leave. A worker that SIGTERM itself has ended did not listen yet, and held nothing;
    nor does a node without workers.
    """
    if is_told:
        codes = [Preempted.exit_code if code == -signal.SIGTERM else code for code in codes] or [Preempted.exit_code]
    telling = next((code for code in TELLING_CODES if code in codes), None)
    if telling is not None:
        return telling
    if Preempted.exit_code in codes and set(codes) <= {0, Preempted.exit_code}:
        return Preempted.exit_code
    return int(has_failed or any(codes))


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list such as 'a1,b[3-5]'."""
    head, bracket, rest = nodelist.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]


def _nodes(text: str, problems: list[str]) -> tuple[int, int]:
    least, _, most = text.partition(":")
    try:
        found = int(least), int(most or least)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        problems.append(f"--nodes must be N or MIN:MAX with 1 <= MIN <= MAX, not {text!r}")
    return found


def _wrong_numbers(flags: Flags) -> Iterator[str]:
    if flags.ranks is not None and flags.ranks < 1:
        yield f"--ranks must be at least 1, not {flags.ranks}; leave it out for a rank on each GPU"
    for name, seconds in (("--ttl-s", flags.ttl_s), ("--grace-s", flags.grace_s)):
        if not 0 <= seconds < math.inf:
            yield f"{name} must be a number of seconds, 0 or more, not {seconds}"


def _count(environ: Mapping[str, str], name: str, problems: list[str]) -> int | None:
    text = environ.get(name)
    if text is None or text in ("auto", "gpu", "cpu"):
        return None
    if not text.isdigit() or int(text) < 1:
        problems.append(f"{name} must be a number of ranks, not {text!r}")
        return None
    return int(text)


@contextlib.contextmanager
def _etcd(plan: Launch) -> Iterator[str]:
    """Yield the endpoint of the job's etcd, started here if the job has none."""
    if plan.endpoint is not None:
        yield plan.endpoint
        return
    from rendezvous.etcd.server import EtcdServer

    if plan.max_nodes == 1:
        with EtcdServer() as server:
            yield server.endpoint
    elif plan.is_etcd_host:
        with EtcdServer(port=ETCD_PORT, host="0.0.0.0"):
            yield f"{socket.gethostname()}:{ETCD_PORT}"
    else:
        yield f"{plan.etcd_address}:{ETCD_PORT}"


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
        recovery=plan.recovery,
        ttl=plan.ttl_s,
    )
    handler = create_handler(parameters)
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
    has_failed = is_told = False
    with _signals(SignalException):
        try:
            has_failed = agent.run().is_failed()
        except SignalException:
            is_told = True
        except RendezvousTimeoutError as error:
            raise TooFewNodesError(str(error)) from error
        except RendezvousError as error:
            sys.stderr.write(f"error: {error}\n")
            has_failed = True
        finally:
            handler.shutdown()
    return exit_code(agent.worker_codes(), has_failed=has_failed, is_told=is_told)


@contextlib.contextmanager
def _signals(kind: type[Exception]) -> Iterator[None]:
    """Raise an exception, which carries the signal, where the agent waits; a later second one is the launcher's end."""
    since_s: list[float] = []

    def told(number: int, frame: object) -> None:
        since_s.append(time.monotonic())
        if len(since_s) > 1:
            if since_s[-1] - since_s[0] > SAME_REQUEST_S:
                os._exit(EXIT_AT_ONCE)  # the workers die with it
            return
        raise kind(f"told to leave by {signal.Signals(number).name}", signal.SIGTERM)

    before = {number: signal.signal(number, told) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def count_gpus() -> int:
    """Count this node's GPUs without importing torch; 0 where there is no driver."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    total = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return total if visible is None else min(total, len([part for part in visible.split(",") if part]))
