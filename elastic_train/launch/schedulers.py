"""Read the job from the environment of whoever started this node: torchrun's variables (PET_*), Slurm's, SkyPilot's.

Kubernetes operators set torchrun's; users may set some of them along with Slurm's or SkyPilot's, so torchrun's values
take precedence. Variables without effect are rejected by name, or named in a warning: nobody should unknowingly train
alone on one of many nodes.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_NAMES = """
LOG_DIR REDIRECTS TEE ROLE MONITOR_INTERVAL START_METHOD LOGS_SPECS STANDALONE LOCAL_RANKS_FILTER NUMA_BINDING
EVENT_LOG_HANDLER SHUTDOWN_TIMEOUT DUPLICATE_STDOUT_FILTERS DUPLICATE_STDERR_FILTERS RUN_PATH
SIGNALS_TO_HANDLE VIRTUAL_LOCAL_RANK MODULE NO_PYTHON PRINT_COMPLETION LOG_LINE_PREFIX_TEMPLATE
"""
WITHOUT_EFFECT = frozenset(f"PET_{name}" for name in _NAMES.split())
"""Options of any supported torchrun that have no effect here."""
_READ = "NNODES NPROC_PER_NODE RDZV_ENDPOINT RDZV_ID RDZV_BACKEND RDZV_CONF MAX_RESTARTS LOCAL_ADDR"
READ = frozenset(f"PET_{name}" for name in f"{_READ} NODE_RANK MASTER_ADDR MASTER_PORT".split())
CONF = "PET_RDZV_CONF"
SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Set by launchers that start one process per rank or node, and expect the processes to find each other by these."""
_OWN_ADDRESSES = ("localhost", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class Found:
    """Facts about the job from the environment; None for each that is not given.

    `host` is the node that starts the job's etcd if there is no other; `is_host` is True if that is this node.
    """

    nodes: str | None = None
    ranks: str | None = None
    run_id: str | None = None
    endpoint: str | None = None
    host: str | None = None
    is_host: bool | None = None
    max_restarts: str | None = None
    local_addr: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)


def found_in(environ: Mapping[str, str], problems: list[str], warnings: list[str]) -> Found:
    """Read torchrun's variables, and the scheduler's for the rest; add problems, and warnings about ignored ones."""
    said = said_to_torchrun(environ, problems, warnings)
    scheduled = _slurm(environ, problems) or _skypilot(environ) or Found()
    is_placed = said.host is not None
    return replace(
        said,
        nodes=said.nodes or scheduled.nodes,
        ranks=said.ranks or scheduled.ranks,
        run_id=said.run_id or scheduled.run_id,
        host=said.host if is_placed else scheduled.host,
        is_host=said.is_host if is_placed else scheduled.is_host,
    )


def lonely(environ: Mapping[str, str]) -> str | None:
    """Return why a job of one node would not be what was meant; None if there is no sign of it."""
    for name in SIZES:
        if environ.get(name, "1") not in ("", "1"):
            return (
                f"{name}={environ[name]} says that there are more processes, but not where they meet: give "
                f"--nodes, --endpoint HOST:PORT of an etcd and --id, or unset {name} for a job of this node alone"
            )
    return None


def heterogeneous(environ: Mapping[str, str]) -> str | None:
    """Return why a heterogeneous Slurm job cannot be read as one job; None if it is not one."""
    size = environ.get("SLURM_HET_SIZE", "1")
    return (
        None
        if size in ("", "1")
        else (
            f"SLURM_HET_SIZE={size}: Slurm tells each component of a heterogeneous job of its own nodes alone, so the "
            "others would idle or train apart: give --nodes, --endpoint HOST:PORT of an etcd and --id to all components"
        )
    )


def uncounted(environ: Mapping[str, str], found: Found) -> str | None:
    """Return why a job without a known number of nodes seems to have several; None if there is no sign of it."""
    rank, host = environ.get("PET_NODE_RANK", ""), environ.get("PET_MASTER_ADDR", "")
    has_others = {
        "PET_NODE_RANK": rank not in ("", "0"),
        "PET_MASTER_ADDR": host not in ("", *_OWN_ADDRESSES),
        "PET_RDZV_ENDPOINT": found.is_host is False,
    }
    name = next((name for name, has in has_others.items() if has), None)
    return name and (
        f"{name}={environ[name]} says that there are other nodes, but not how many: set PET_NNODES, or give --nodes "
        "(1 for a job of this node alone)"
    )


def without_schedulers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a node configured by flags only, without those of the scheduler that started others.

    PET_RDZV_CONF, about reaching etcd, has no flag, and stays.
    """
    prefixes = ("PET_", "SLURM_", "SKYPILOT_")
    left_out = {name for name in environ if name.startswith(prefixes) and name != CONF} | {*SIZES}
    return {name: value for name, value in environ.items() if name not in left_out}


def said_to_torchrun(environ: Mapping[str, str], problems: list[str], warnings: list[str]) -> Found:
    """Read torchrun's variables only."""
    named = {name: value for name, value in environ.items() if name.startswith("PET_") and value}
    unknown = sorted(named.keys() - READ - WITHOUT_EFFECT)
    if unknown:
        problems.append(f"{', '.join(unknown)}: not known to this launcher, nor to torchrun 2.13; unset it")
    if without := sorted(named.keys() & WITHOUT_EFFECT):
        warnings.append(f"{', '.join(without)}: without effect here")
    backend = named.get("PET_RDZV_BACKEND", "etcd")
    endpoint = named.get("PET_RDZV_ENDPOINT")
    host, rank = named.get("PET_MASTER_ADDR"), named.get("PET_NODE_RANK")
    is_host = None if rank is None else rank == "0"
    if backend in ("c10d", "static") and endpoint:
        # the address is a node's, where torchrun would host its store
        host, endpoint = endpoint.rpartition(":")[0] or endpoint, None
        is_host = _is_here(host)
    elif backend not in ("c10d", "static", "etcd", "etcd-v2"):
        problems.append(f"PET_RDZV_BACKEND={backend}: give etcd, and PET_RDZV_ENDPOINT=HOST:PORT of one")
    return Found(
        nodes=named.get("PET_NNODES"),
        ranks=named.get("PET_NPROC_PER_NODE"),
        run_id=named.get("PET_RDZV_ID") or (f"{host}:{named.get('PET_MASTER_PORT', '')}" if host else None),
        endpoint=endpoint,
        host=host,
        is_host=is_host,
        max_restarts=named.get("PET_MAX_RESTARTS"),
        local_addr=named.get("PET_LOCAL_ADDR"),
        conf=read_conf(named.get(CONF, ""), problems),
    )


def _is_here(host: str) -> bool:
    """Return True if a host is this machine, by its name or one of its addresses."""
    if host in _OWN_ADDRESSES or host.partition(".")[0] == socket.gethostname().partition(".")[0]:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    from rendezvous.etcd.server import unreachable  # only here: etcd's client is slow to import

    return unreachable(host) is None


def read_conf(text: str, problems: list[str]) -> dict[str, str]:
    """Parse PET_RDZV_CONF, comma-separated key=value pairs; the keys' meaning is checked where they are used."""
    conf = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        key, equals, value = pair.partition("=")
        if not equals:
            problems.append(f"PET_RDZV_CONF: {pair!r} is not KEY=VALUE")
        conf[key.strip()] = value.strip()
    return conf


def _slurm(environ: Mapping[str, str], problems: list[str]) -> Found | None:
    if "SLURM_JOB_ID" not in environ:
        return None
    num_nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_JOB_NUM_NODES") or "1"
    nodelist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if any(part.partition("(")[0] != "1" for part in tasks.split(",")):
        problems.append(
            f"SLURM_STEP_TASKS_PER_NODE={tasks} starts several launchers on a node, but one starts all ranks of it: "
            "srun --ntasks-per-node=1, with all GPUs of the node for that task (--gpus-per-node, not --gpus-per-task)"
        )
    if num_nodes != "1" and "SLURM_STEP_ID" not in environ:
        problems.append(
            f"SLURM_JOB_NUM_NODES={num_nodes}, but the launcher runs on the first node alone: start it with srun"
        )
    step = environ.get("SLURM_STEP_ID", "0")
    job = environ["SLURM_JOB_ID"]
    return Found(
        nodes=num_nodes if num_nodes == "1" else f"1:{num_nodes}",
        run_id=job if step == "0" or not step.isdigit() else f"{job}.{step}",
        host=first_host(nodelist) or None,
        is_host=environ.get("SLURM_NODEID", "0") == "0",
    )


def _skypilot(environ: Mapping[str, str]) -> Found | None:
    addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
    if not addresses:
        return None
    num_gpus = environ.get("SKYPILOT_NUM_GPUS_PER_NODE")
    return Found(
        nodes="1" if len(addresses) == 1 else f"1:{len(addresses)}",
        ranks=None if num_gpus == "0" else num_gpus,
        run_id=environ.get("SKYPILOT_TASK_ID"),
        host=addresses[0],
        is_host=environ.get("SKYPILOT_NODE_RANK", "0") == "0",
    )


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list such as 'a1,b[3-5]'."""
    head, bracket, rest = nodelist.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]
