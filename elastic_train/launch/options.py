"""Resolve what `elastic-train launch` starts from flags and environment; all mistakes are reported at once.

Flags override a scheduler's variables (`schedulers`). Nothing here imports torch, so mistakes are reported before its
slow import.
"""

from __future__ import annotations

import os
import re
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from elastic_train.errors import ConfigError
from elastic_train.launch.schedulers import CONF, Found, found_in, heterogeneous, lonely, uncounted
from rendezvous.etcd.options import ETCD_KEYS, wrong_id

_NODES = re.compile("([0-9]+)(?::([0-9]+))?")
RECOVERIES = ("live", "restart")
MAX_RESTARTS, TTL_S, TIMEOUT_S, MOST_S = 100, 3.0, 900.0, 1e9
SYNONYMS = {"ttl": ("ttl", "keep_alive_interval", "keep_alive_max_attempt"), "timeout": ("timeout", "join_timeout")}
"""Names in --rdzv_conf of the option that each flag sets."""
TO_ETCD = {**{key: key for key in ETCD_KEYS}, "cacert": "ca_cert", "ssl_cert": "cert", "ssl_cert_key": "key"}
"""Keys of --rdzv_conf about an etcd that the launcher has not started, with our name of each."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings of one node of a job; `endpoint` is None if the job needs its own etcd."""

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
    timeout_s: float = TIMEOUT_S
    conf: Mapping[str, str] = field(default_factory=dict)
    """Rendezvous options without a flag, as in torchrun's --rdzv_conf."""
    warnings: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Return a worker's command line without the interpreter."""
        return ["-m", "elastic_train", str(self.config), *self.overrides]

    def rendezvous_options(self) -> dict[str, object]:
        """Return the equivalent of torchrun's --rdzv_conf: the environment's, completed by the flags."""
        flags = {"recovery": self.recovery, "ttl": self.ttl_s, "compact": self.compact, "timeout": self.timeout_s}
        said = {flag for flag in flags if any(name in self.conf for name in SYNONYMS.get(flag, (flag,)))}
        return {**{flag: value for flag, value in flags.items() if flag not in said}, **self.conf}


_JOB = Parameter(group=Group("Job", sort_key=10))
_FAULTS = Parameter(group=Group("Faults", sort_key=11))
_NETWORK = Parameter(group=Group("Network", sort_key=12))


@dataclass(frozen=True, slots=True)
class Flags:
    """Command line flags; None for flags not given."""

    nodes: Annotated[str | None, _JOB] = None
    "Nodes that train, N or MIN:MAX; default: the scheduler's, else 1. Under Slurm and SkyPilot N means 1:N."
    ranks: Annotated[int | None, _JOB] = None
    "Ranks on each node; default: the scheduler's, else one for each GPU, else 1."
    endpoint: Annotated[str | None, _JOB] = None
    "HOST:PORT of an etcd, or @FILE with that; default: one on the first node. Nodes without a scheduler need it."
    run_id: Annotated[str | None, _JOB] = None
    "Name of the job, the same on all of its nodes; default: the scheduler's."
    recovery: Annotated[str, _FAULTS] = "live"
    "live: the other ranks train on; restart: all of them start again from a commit."
    max_restarts: Annotated[int | None, _FAULTS] = None
    "Restarts of workers before the job ends, with live recovery for each cause in an hour; default: 100."
    ttl_s: Annotated[float | None, _FAULTS] = None
    "Seconds without a sign of life after which a worker counts as lost; default: 3."
    grace_s: Annotated[float, _FAULTS] = 30.0
    "Seconds from SIGTERM to SIGKILL."
    local_addr: Annotated[str | None, _NETWORK] = None
    "Address by which other nodes reach this one; default: the one from which it reaches etcd."
    compact: Annotated[bool, _NETWORK] = True
    "Delete etcd's history that is older than ten minutes, if it serves nothing but such jobs."
    timeout_s: Annotated[float | None, _NETWORK] = None
    "Seconds to wait for MIN nodes, and for the first node's etcd, before exit code 77; default: 900."

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the flags; numbers of nodes are parsed where needed."""
        if self.recovery not in RECOVERIES:
            yield f"--recovery must be one of {', '.join(RECOVERIES)}, not {self.recovery!r}"
        if self.ranks is not None and self.ranks < 1:
            yield f"--ranks must be at least 1, not {self.ranks}; leave it out for one rank per GPU"
        if self.max_restarts is not None and self.max_restarts < 0:
            yield f"--max-restarts must be at least 0, not {self.max_restarts}"
        for name, seconds in (("--ttl-s", self.ttl_s), ("--grace-s", self.grace_s), ("--timeout-s", self.timeout_s)):
            if seconds is not None and not 0 <= seconds <= MOST_S:
                yield f"{name} must be a number of seconds, from 0 to {MOST_S:.0f}, not {seconds}"

    def arguments(self) -> list[str]:
        """Return the equivalent command line, without defaults."""
        words: list[str] = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value == each.default:
                continue
            name = "id" if each.name == "run_id" else each.name.replace("_", "-")
            words += [f"--no-{name}"] if value is False else [f"--{name}", f"{value}"]
        return words


def resolve(config: Path, overrides: Sequence[str], flags: Flags, environ: Mapping[str, str], num_gpus: int) -> Launch:
    """Fill in what the flags leave open; raise ConfigError with every mistake found."""
    problems: list[str] = []
    warnings: list[str] = []
    found = found_in(environ, problems, warnings)
    nodes = flags.nodes or found.nodes
    least, most = parse_nodes(nodes or "1", problems)
    problems += flags.problems()
    endpoint = flags.endpoint or found.endpoint
    run_id = found.run_id if flags.run_id is None else flags.run_id
    problems += wrong_id(run_id) if run_id is not None else []
    problems += _nowhere_to_meet(most, endpoint, run_id, found)
    problems += for_no_etcd(endpoint, found.conf)
    if flags.nodes is None and (why := heterogeneous(environ)):
        problems.append(why)
    if nodes is None and (why := lonely(environ) or uncounted(environ, found)):
        problems.append(why)
    ranks = flags.ranks or _count(found.ranks, "the number of ranks of a node", problems) or max(1, num_gpus)
    max_restarts = _count(found.max_restarts, "PET_MAX_RESTARTS", problems, least=0)
    ttl_s, timeout_s = flags.ttl_s, flags.timeout_s
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
        max_restarts=next(n for n in (flags.max_restarts, max_restarts, MAX_RESTARTS) if n is not None),
        ttl_s=TTL_S if ttl_s is None else ttl_s,
        grace_s=flags.grace_s,
        local_addr=flags.local_addr or found.local_addr,
        compact=flags.compact,
        is_etcd_host=not shared or found.is_host is True,
        etcd_address=found.host if shared and found.host else "127.0.0.1",
        timeout_s=TIMEOUT_S if timeout_s is None else timeout_s,
        conf=_without(
            found.conf,
            ttl=ttl_s,
            timeout=timeout_s,
            recovery=None if flags.recovery == RECOVERIES[0] else flags.recovery,  # a default is not given
            compact=None if flags.compact else flags.compact,
        ),
        warnings=tuple(warnings),
    )


def _nowhere_to_meet(most: int, endpoint: str | None, run_id: str | None, found: Found) -> Iterator[str]:
    if most > 1 and endpoint is None and found.host is None:
        yield (
            "--endpoint HOST:PORT of an etcd is needed for several nodes (or set PET_RDZV_ENDPOINT), unless Slurm, "
            "SkyPilot or PET_MASTER_ADDR says which node is the first, to start one there; to try it, run an etcd with "
            "`python -m rendezvous`"
        )
    if most > 1 and endpoint is None and found.host is not None and found.is_host is None:
        yield (
            f"PET_MASTER_ADDR={found.host} says which node starts the job's etcd, and nothing says whether this is it: "
            "set PET_NODE_RANK on each node, or give --endpoint HOST:PORT of an etcd"
        )
    if most > 1 and run_id is None:
        yield "--id NAME is needed for several nodes: give all of them the same name"


def for_no_etcd(endpoint: str | None, conf: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem if options for a user's etcd are given without its endpoint."""
    if endpoint is None and (named := [name for name in TO_ETCD if name in conf]):
        yield (
            f"{CONF} says how to reach an etcd ({', '.join(named)}), and nothing says where it is: give --endpoint "
            "HOST:PORT. The etcd that a job starts for itself has neither certificates nor users"
        )


def _without(conf: Mapping[str, str], **given: float | str | None) -> dict[str, str]:
    """Return the options that no flag sets."""
    taken = {name for flag, value in given.items() if value is not None for name in SYNONYMS.get(flag, (flag,))}
    return {name: value for name, value in conf.items() if name not in taken}


def parse_nodes(text: str, problems: list[str]) -> tuple[int, int]:
    """Parse N or MIN:MAX; add a problem if it is neither."""
    read = _NODES.fullmatch(text)
    found = (int(read[1]), int(read[2] or read[1])) if read else (0, 0)
    if not 1 <= found[0] <= found[1]:
        problems.append(f"--nodes must be N or MIN:MAX with 1 <= MIN <= MAX, not {text!r}")
    return found


def _count(text: str | None, name: str, problems: list[str], *, least: int = 1) -> int | None:
    if text is None or text in ("auto", "gpu", "cpu"):
        return None
    if re.fullmatch("[0-9]+", text) is None or (least and not int(text)):
        problems.append(f"{name} has to be a number, {least} or more, not {text!r}")
        return None
    return int(text)


def count_gpus() -> int:
    """Count this node's GPUs without importing torch; 0 without a driver."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    total = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return total if visible is None else min(total, len([part for part in visible.split(",") if part]))
