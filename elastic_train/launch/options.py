"""What `elastic-train launch` starts, resolved from its flags and the environment; every mistake is reported at once.

A flag wins over torchrun's own PET_* variables (Kubernetes operators set them), and those win over Slurm's. Nothing
here imports torch, so a mistake is reported before its seconds of imports.
"""

from __future__ import annotations

import math
import os
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_train.errors import ConfigError

RECOVERIES = ("live", "restart")


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start one node of a job; `endpoint` is None if the job needs an etcd of its own."""

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
    local_addr: str | None = None
    compact: bool = True
    is_etcd_host: bool = True
    etcd_address: str = "127.0.0.1"

    def arguments(self) -> list[str]:
        """Return a worker's command line without the interpreter."""
        return ["-m", "elastic_train", str(self.config), *self.overrides]


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags of the command line; None for a flag that was not given."""

    nodes: str | None = None
    ranks: int | None = None
    endpoint: str | None = None
    run_id: str | None = None
    recovery: str = "live"
    max_restarts: int = 100
    ttl_s: float = 3.0
    grace_s: float = 30.0
    local_addr: str | None = None
    compact: bool = True


def resolve(config: Path, overrides: Sequence[str], flags: Flags, environ: Mapping[str, str], num_gpus: int) -> Launch:
    """Fill in what the flags leave open; raise ConfigError with every mistake found."""
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
            "--endpoint HOST:PORT of an etcd is needed for several nodes outside Slurm (or set PET_RDZV_ENDPOINT)"
        )
    if most > 1 and run_id is None:
        problems.append("--id NAME is needed for several nodes: give all of them the same name")
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
        local_addr=flags.local_addr or environ.get("PET_LOCAL_ADDR") or None,
        compact=flags.compact,
        is_etcd_host=not shared or environ.get("SLURM_NODEID", "0") == "0",
        etcd_address=first_host(environ["SLURM_JOB_NODELIST"]) if shared else "127.0.0.1",
    )


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
        yield f"--ranks must be at least 1, not {flags.ranks}; leave it out for one rank per GPU"
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


def count_gpus() -> int:
    """Count this node's GPUs without importing torch; 0 where there is no driver."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    total = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return total if visible is None else min(total, len([part for part in visible.split(",") if part]))
