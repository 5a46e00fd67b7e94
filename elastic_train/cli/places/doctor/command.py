"""The command: what is to be examined follows from CONFIG, the flags and the variables that a launcher would read."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators
from rich.table import Column, Table
from rich.text import Text

from elastic_train.cli.output import Json, console, print_json
from elastic_train.cli.places.doctor.etcd import examine_etcd, examine_own_etcd
from elastic_train.cli.places.doctor.machine import examine_computing, examine_gpus, examine_limits, examine_torch
from elastic_train.cli.places.doctor.peers import Self, examine_peers
from elastic_train.cli.places.job import etcd_of
from elastic_train.config import sources
from elastic_train.config.schema import Config
from elastic_train.errors import ConfigError, StorageError
from elastic_train.health.result import Finding, Planned, examine_all, fail, ok
from elastic_train.launch.options import TTL_S, count_gpus
from elastic_train.launch.schedulers import Found, found_in, lonely
from elastic_train.system.extras import version_of
from rendezvous.etcd.options import EtcdOptions
from rendezvous.etcd.store import EtcdStore
from rendezvous.torchelastic.addresses import own_address

TIMEOUT_S = 18.0
"""For everything but the wait for peers, which are started at other times."""
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class Asked:
    """The values of the flags."""

    etcd: str | None
    run_id: str | None
    num_peers: int
    wait_s: float
    local_addr: str | None


def doctor(
    config: Path | None = None,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    etcd: str | None = None,
    run_id: Annotated[str | None, Parameter(name="--id")] = None,
    peers: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 0,
    wait_s: float = 60.0,
    local_addr: str | None = None,
    json_: Json = False,
) -> int:
    """Examine this machine as a node of a job: each line is ok, warn or fail, with what to do about it.

    Python, torch, GPUs, limits; products and memory of each core and GPU; etcd (reachable, room, latency, leases,
    permission, TLS, clock); with CONFIG the storage of its commits (writable, created once only, seen at once, speed)
    and MLflow. In 20 s at most.

    --etcd HOST:2379[,...]: as --endpoint of `launch`; PET_RDZV_ENDPOINT, and PET_RDZV_CONF for certificates and user,
    are read as well. --peers N: meet the doctors of N other nodes, which are started with the same --etcd and --id
    within --wait-s seconds (60), and examine addresses, ports and clocks both ways, and whether all see one storage.
    --local-addr: as for `launch`. Exit code 0: nothing failed, though there may be warnings; 1: something did.
    """
    asked = Asked(etcd, run_id, peers, wait_s, local_addr)
    findings = list(_examined(config, overrides, asked))
    if json_:
        print_json({"findings": [asdict(finding) for finding in findings], "fit": _is_fit(findings)})
    else:
        _show(findings)
    return 0 if _is_fit(findings) else 1


def _is_fit(findings: Iterable[Finding]) -> bool:
    return all(finding.level != "fail" for finding in findings)


def _examined(path: Path | None, overrides: Sequence[str], asked: Asked) -> Iterator[Finding]:
    problems: list[str] = []
    found = found_in(os.environ, problems, [])
    yield from (fail("variables", problem, "see docs/operations/run.md") for problem in problems)
    if asked.etcd is None and found.endpoint is None and asked.num_peers == 0 and (why := lonely(os.environ)):
        yield fail("variables", why, "see docs/operations/run.md")
    config = None
    if path is not None:
        try:
            config = sources.load(path, environ=os.environ, arguments=overrides)
            yield ok("configuration", str(path))
        except ConfigError as error:
            yield from (fail("configuration", problem, "correct it") for problem in error.problems)
    options = None
    if asked.num_peers and asked.etcd is None and found.endpoint is None:
        raise ConfigError("--peers needs --etcd HOST:PORT, where the doctors of all nodes meet")
    try:
        options = etcd_of(asked.etcd, found)
    except ConfigError as error:
        yield from (fail("etcd", problem, "correct it") for problem in error.problems)
    yield from examine_all(dict(_planned(config, options, asked, found)))


def _planned(
    config: Config | None, options: EtcdOptions | None, asked: Asked, found: Found
) -> Iterator[tuple[str, Planned]]:
    """Yield what is to be examined; what needs pyarrow or MLflow is imported only for a configuration."""
    run_id = asked.run_id or found.run_id or "doctor"
    busy = "is another program loading this machine?"
    yield "torch", Planned(examine_torch, busy, TIMEOUT_S)
    yield "gpu", Planned(lambda: examine_gpus(count_gpus()), "look at nvidia-smi, and the kernel's log", TIMEOUT_S)
    yield "computing", Planned(examine_computing, busy, TIMEOUT_S)
    yield "limits", Planned(examine_limits, "is a file system stuck?", TIMEOUT_S)
    if options is None:
        yield "etcd", Planned(examine_own_etcd, "", TIMEOUT_S)
    else:
        examine = partial(examine_etcd, options, run_id, TTL_S)
        yield "etcd", Planned(examine, "is it up, and may this user use it?", TIMEOUT_S)
    if config is not None:
        from elastic_train.cli.places.doctor.storage import examine_storage, examine_tracker

        storage = partial(examine_storage, config.checkpoint_url, has_peers=asked.num_peers > 0)
        yield "storage", Planned(storage, "can this node reach and write it? docs/storage.md", TIMEOUT_S)
        if config.tracking.mlflow_uri is not None:
            tracker = partial(examine_tracker, config.tracking.mlflow_uri)
            yield "mlflow", Planned(tracker, "training continues without it; values are sent later", TIMEOUT_S)
    if asked.num_peers and options is not None:
        meet = partial(_meet, options, run_id, config, asked, found)
        yield "peers", Planned(meet, "is etcd reachable?", asked.wait_s + TIMEOUT_S)


def _meet(options: EtcdOptions, run_id: str, config: Config | None, asked: Asked, found: Found) -> Iterator[Finding]:
    address = own_address(asked.local_addr or found.local_addr, options, asked.num_peers + 1)
    own = Self(address, _versions(), partial(_word, config))
    with contextlib.closing(EtcdStore(options)) as store:
        yield from examine_peers(store, run_id, own, asked.num_peers, asked.wait_s)


def _word(config: Config | None) -> str | None:
    """Return what names the store that this node sees; None if there is none, or it does not answer."""
    if config is None:
        return None
    from elastic_train.cli.places.doctor.storage import open_for_doctor
    from elastic_train.world import one_store

    with contextlib.suppress(StorageError, ConfigError):
        return one_store.identify(open_for_doctor(config.checkpoint_url))
    return None


def _versions() -> Mapping[str, str]:
    found = {name: version_of(name) or "unknown" for name in ("elastic-train", "torch")}
    return {**found, "python": platform.python_version()}


def _show(findings: Sequence[Finding]) -> None:
    table = Table.grid("", "", Column(overflow="fold"), padding=(0, 2), expand=False)
    for finding in findings:
        text = Text(finding.found)
        if finding.remedy and finding.level != "ok":
            text.append(f"\n→ {finding.remedy}", style="italic")
        table.add_row(Text(finding.level, style=_COLOURS[finding.level]), Text(finding.check), text)
    console().print(table)
