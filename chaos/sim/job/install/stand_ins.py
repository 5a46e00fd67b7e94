"""Stand-ins that know the job: etcd, environments, evidence."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType

import torch

from chaos.sim.job.host import Host
from chaos.sim.job.surroundings import Surroundings
from chaos.sim.machine import stdlib
from chaos.sim.machine.etcd import EtcdClient
from chaos.sim.machine.object_store import StorageClient
from elastic_train.config.schema import Config
from elastic_train.health.precheck import LIMIT_S, Proof
from elastic_train.health.result import Planned, fail
from elastic_train.tracking.background_files import BackgroundFiles
from elastic_train.tracking.history import History, UnformedWorlds
from elastic_train.tracking.history_files import Stagnation


def client_of(around: Surroundings) -> Callable[..., EtcdClient]:
    """Return the constructor of a process's etcd client."""

    def client(*_: object, give_up_after_s: float = 4.0) -> EtcdClient:
        return EtcdClient(around.etcd, around.kernel.process, give_up_after_s)

    return client


def undelayed(store: StorageClient, on_progress: object) -> StorageClient:
    """Return the store itself: simulated calls have deadlines of their own."""
    return store


class Launcher:
    """`os`, reduced to the environment that the agent gave the process."""

    def __init__(self, host: Host) -> None:
        self._host = host

    @property
    def environ(self) -> dict[str, str]:
        return self._host.environ_of(self._host.kernel.process)


class SimHistory(History):
    """A history that writes to the evidence, stamped by a node clock that no fault moves."""

    def __init__(self, host: Host, files: BackgroundFiles, run_dir: str, term: int, rank: int, most_bytes: int) -> None:
        self.term, self._rank = term, rank
        self._host, self._run_dir = host, run_dir
        process = host.kernel.process
        self._name = f"{term:08d}-{rank:05d}-{process.pid}-{process.node}-{process.born:.6f}"

    def prune(self, keep_terms: int) -> None:
        """The evidence is kept whole."""

    def last_applied(self) -> None:
        """Banners are not shown."""

    def _name_newest(self, key: str, step: int) -> None:
        """Etcd names it."""

    def newest_commit(self) -> None:
        """Etcd alone names the newest commit."""

    def stagnation(self, most: int) -> Stagnation:
        """Return an empty record: nothing in a simulated job makes it stagnate."""
        return Stagnation()

    def close(self) -> None:
        """Nothing is held."""

    def _write(self, op: str, **fields: object) -> None:
        self._host.kernel.check(self._host.kernel.current)
        at = stdlib.SteadyTime(self._host.kernel).time()
        self._host.record.write(self._name, op, at=at, term=self.term, rank=self._rank, **fields)


class SimUnformedWorlds(UnformedWorlds):
    """Records worlds that did not form in the evidence."""

    def __init__(self, host: Host, *_: object) -> None:
        process = host.kernel.process
        self._host, self._name = host, f"unformed-{process.pid}-{process.node}-{process.born:.6f}"
        self._who = {"pid": process.pid, **host.identity()}

    def note(self, term: int, rank: int, world: int, why: str) -> None:
        at = stdlib.SteadyTime(self._host.kernel).time()
        place = {"term": term, "rank": rank, "world": world, "why": why}
        self._host.record.write(self._name, "unformed", at=at, **place, **self._who)


def prove(host: Host, config: Config, device: torch.device) -> Proof | None:
    """Start the check of a machine that computes wrongly; return None for any other."""
    if host.kernel.process.node not in host.around.unfit or host.context() is None:
        return None
    wrong = fail("products", "core 0 computes wrongly", "take this machine out of use")
    return Proof({"products": Planned(lambda: [wrong], "", LIMIT_S)})


def note_unfit(host: Host, files: BackgroundFiles, run_dir: str, why: str) -> None:
    """Note in the evidence that a machine failed its health check."""
    process = host.kernel.process
    who = {"pid": process.pid, **host.identity()}
    name, at = f"unfit-{process.pid}-{process.node}-{process.born:.6f}", stdlib.SteadyTime(host.kernel).time()
    host.record.write(name, "unfit", at=at, term=0, why=why, **who)


Replacement = tuple[ModuleType | type, str, object]
"""A module or class, a name in it, and the replacement."""


def within(path: str, **stand_ins: object) -> Iterator[Replacement]:
    module = importlib.import_module(path)
    for name, stand_in in stand_ins.items():
        assert hasattr(module, name), f"{path} has no {name} any more: the simulator's table is out of date"
        yield module, name, stand_in


def nothing(*_: object) -> None: ...
