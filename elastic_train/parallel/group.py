"""The ranks that train together, and the few collectives they use.

A `Group` owns its process groups (gloo for host memory, another one for a device) and never touches torch.distributed's
default group, so that a world can be abandoned and another formed in the same process. All waits go through one
function; every failure of a collective is a PeerLostError. A world of one needs no process group.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from elastic_train.errors import ConfigError, HungError, PeerLostError
from elastic_train.parallel.connections import Connections, gloo_options
from elastic_train.parallel.devices.device import ABORT_S, HOST, Device, DeviceGroup, abort_all
from elastic_train.parallel.point_to_point import OWN_ERRORS, Backend, PointToPoint, ThroughHost, Traffic, Work
from rendezvous.open_files import make_room_for
from rendezvous.waiting import Bystander, Call, GivenUp

T = TypeVar("T")
SMALL_BYTES = 4096
"""Up to this many bytes per rank are gathered through rank 0, in 1 + log2(size) hops instead of a ring's size - 1."""
SLOT_BYTES = 1024
"""Bytes of the first collective of an exchange of objects; most objects fit, and need no second one."""
_LENGTH = struct.Struct("<Q")


class Group(PointToPoint):
    """`size` ranks; this process is `rank`.

    `is_broken` is called with the seconds that a wait has lasted; once it returns True, all waits raise PeerLostError,
    whatever the peers do. Without it, a wait ends when the peers answer or die, or after `timeout_s`. Waits run inside
    `resting()`. Peers connect to `address`, by default to that of the interface GLOO_SOCKET_IFNAME or of this machine's
    name.
    """

    _connections: Connections | None = None
    store: Store | None = None
    """The store where the ranks met; None in a world of one."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store | None,
        timeout_s: float,
        device: Device = HOST,
        *,
        address: str | None = None,
        is_broken: Callable[[float], bool] | None = None,
        resting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.rank, self.size = rank, size
        self._timeout_s, self._address, self.device = timeout_s, address, device
        self.store = None if size == 1 else store
        self._parts: list[Group] = []
        self.begun = {}
        self._resting = resting
        self._is_broken = is_broken
        self._host: Backend | None = None
        self._device: DeviceGroup | None = None
        self._holds = device.holds
        self._bystander = Bystander(f"group of rank {rank}") if is_broken is not None and size > 1 else None
        self._expected: list[Call[Any]] = []
        if size == 1:
            return
        assert store is not None, "a world of several ranks meets at a store"
        make_room_for(size)
        try:
            self._connect(store, timedelta(seconds=timeout_s), device, address)
        except (PeerLostError, ConfigError):
            self.abandon()
            raise

    def _connect(self, store: Store, timeout: timedelta, device: Device, address: str | None) -> None:
        rank, size = self.rank, self.size
        gloo, connections = gloo_options(timeout, address), Connections(store)
        self._host = self.guard(
            lambda: cast(Backend, dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, gloo))
        )
        connections.note()
        self._connections = connections
        if device.connect is not None:
            self._device = DeviceGroup(device, PrefixStore("device", store), rank, size, timeout, self)
            self._device.connect()

    def part(self, name: str, ranks: Sequence[int]) -> Group:
        """Return the group of some ranks, this one included, in their order; it is abandoned together with this one.

        Collective over these ranks; the name must be unique.
        """
        store = None if self.store is None else PrefixStore(name, self.store)
        made = Group(
            ranks.index(self.rank),
            len(ranks),
            store,
            self._timeout_s,
            self.device,
            address=self._address,
            is_broken=self._is_broken,
            resting=self._resting,
        )
        self._parts.append(made)
        return made

    @property
    def connects_devices(self) -> bool:
        """True if devices exchange by themselves, without host memory."""
        return self._device is not None

    def is_on_device(self, tensor: Tensor) -> bool:
        return self._device is not None and self._holds(tensor)

    def listen(self, traffic: Traffic | None) -> None:
        """Start (or, with None, stop) recording the operations of this group and its parts."""
        self.traffic = traffic
        for part in self._parts:
            part.listen(traffic)

    def wait(self, works: Iterable[Work]) -> None:
        """Wait until all works are done, on a device by polling it; every wait of this package is here.

        In gloo, a send's or receive's `is_completed()` turns True only inside `wait`, and a wait that times out closes
        all connections. To stay responsive, wait on another thread; do not poll or wait briefly.
        """
        pending = self._finish_on_device(works)
        if not pending:
            return

        def finish() -> None:
            while pending:
                self.finish(pending[0])
                pending.pop(0)

        self.guard(finish)

    def expect(self, call: Call[Any]) -> None:
        """Register a call on another thread that waits for peers (`Aside`): it must not outlast the group."""
        self._expected.append(call)

    def join(self) -> None:
        """Wait for all registered calls, and raise their errors."""
        while self._expected:
            call = self._expected[0]
            self.polling(call.result_unless)
            self._expected.pop(0)

    def transfer(self, tensor: Tensor, *, to: int | None = None, source: int | None = None) -> None:
        """Send a contiguous tensor to one rank, or fill it from one rank; returns when done."""
        assert (to is None) != (source is None), "a transfer has one other end"
        self.wait([self.send(to, tensor) if to is not None else self.receive(source or 0, tensor)])

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's tensor, by rank: shape (size, *shape)."""
        if self.size == 1:
            return tensor.unsqueeze(0).clone()
        gathered = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        if tensor.nbytes <= SMALL_BYTES and not self._holds(tensor) and self._is_broken is not None:
            self._gather_by_root(tensor.contiguous(), gathered)
            return gathered
        self._run(
            lambda group: group.allgather([list(gathered.unbind(0))], [tensor.contiguous()]), tensor, "all_gather"
        )
        return gathered

    def _gather_by_root(self, tensor: Tensor, gathered: Tensor) -> None:
        """Gather at rank 0, which then sends all to all: whoever has them knows that every rank has begun."""
        options, is_root = dist.GatherOptions(), self.rank == 0
        rows = [list(gathered.unbind(0))] if is_root else []
        works = [self.begin(lambda group: group.gather(rows, [tensor], options), tensor, "all_gather")]
        if is_root:
            self.wait(works)
            works = []
        works.append(self.begin(lambda group: group.broadcast([gathered], _from(0)), gathered, "all_gather"))
        self.wait(works)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks, in place; the order of floating-point additions varies with the world."""
        if self.size > 1:
            self._run(lambda group: group.allreduce([tensor]), tensor, "all_reduce")

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite the tensor with that of one rank."""
        if self.size > 1:
            self._run(lambda group: group.broadcast([tensor], _from(source)), tensor, "broadcast")

    def broadcast_object(self, value: object, source: int = 0) -> object:
        """Return one rank's JSON value on every rank."""
        if self.size == 1:
            return value
        content = json.dumps(value).encode() if self.rank == source else b""
        slot = _slot(content)
        self.broadcast(slot, source)
        length, found = _in_slot(slot)
        if length > len(found):
            rest = _as_tensor(content[len(found) :].ljust(length - len(found)))
            self.broadcast(rest, source)
            found += rest.numpy().tobytes()
        return json.loads(found)

    def all_gather_objects(self, value: object) -> list[Any]:
        """Return every rank's JSON value, by rank."""
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        content = json.dumps(value).encode()
        slots = self.all_gather(_slot(content))
        longest = int(slots[:, : _LENGTH.size].contiguous().view(torch.int64).max())
        if longest <= SLOT_BYTES - _LENGTH.size:
            return _objects_in(slots)
        rest = self.all_gather(_as_tensor(content.ljust(longest)[SLOT_BYTES - _LENGTH.size :]))
        return _objects_in(slots, rest)

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        self.all_gather(torch.zeros(1))

    def round_trip_s(self) -> float:
        """Return the round trip to the nearest peer in seconds; 0 if unknown."""
        return 0.0 if self._connections is None else self._connections.round_trip_s()

    def check(self, waited_s: float) -> None:
        """Raise PeerLostError if the world is broken after a wait of `waited_s` seconds outside a collective."""
        if self._is_broken is not None and self._is_broken(waited_s):
            raise self.lost("the world has changed")

    def close(self) -> None:
        """Leave together with all ranks; a group that exists when the interpreter exits aborts the process.

        Raises PeerLostError if a rank does not come. A second barrier keeps all ranks until each knows that all came,
        since a rank that left earlier would look lost. A peer lost in that barrier has merely left first.
        """
        if self.size > 1:
            self.barrier()
            with suppress(PeerLostError):
                self.barrier()
        self.abandon()

    def abandon(self) -> None:
        """Give the group up at once, although a call may be stuck in it; the process must exit by `os._exit`.

        All connections are shut down, so that peers which wait for this rank lose it at once; a stuck thread is free
        soon for the same reason, and drops the group. Aborts the device work of the group and its parts. Raises
        HungError if the device is not idle then; the process is then unusable.
        """
        if not abort_all(self._let_go()):
            raise HungError(
                f"rank {self.rank} of {self.size}: an exchange was ended, and {ABORT_S:.0f} s later its device still "
                "does not answer: this process ends, so that another can take its place"
            )

    def _let_go(self) -> list[DeviceGroup]:
        """Give up waits in host memory, also of the parts; return the device groups to abort."""
        self.is_abandoned = True
        found = [one for part in self._parts for one in part._let_go()]
        self._parts = []
        groups, begun = [group for group in (self._host, self._device) if group is not None], self.begun
        self._host, self.begun = None, {}
        if self._bystander is not None:

            def drop() -> None:
                begun.clear()
                groups.clear()

            self._bystander.leave(drop)
            self._bystander = None
        for call in self._expected:
            call.give_up()
        self._expected = []
        if self._connections is not None:
            self._connections.shut_down()
        self._connections = None
        device, self._device = self._device, None
        return found if device is None else [*found, device]

    def backend(self, tensor: Tensor) -> Backend:
        assert self._host is not None, "the group was abandoned"
        return ThroughHost(self._host) if self._holds(tensor) else self._host

    def _run(self, collective: Callable[[Backend], Work], tensor: Tensor, kind: str) -> None:
        self.wait([self.begin(collective, tensor, kind)])

    def guard(self, call: Callable[[], T]) -> T:
        """Make a call that needs the peers; give it up when the world is broken."""
        if self._bystander is None:
            return self.polling(lambda is_broken: call())
        bystander = self._bystander
        return self.polling(lambda is_broken: bystander.call(call, is_broken))

    def polling(self, wait: Callable[[Callable[[], bool]], T]) -> T:
        """Wait for the peers by `wait`, given a function that says if the world is broken."""
        started, is_broken = time.monotonic(), self._is_broken
        try:
            with self._resting():
                return wait(lambda: is_broken is not None and is_broken(time.monotonic() - started))
        except GivenUp:
            raise self.lost("the world has changed") from None
        except OWN_ERRORS:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise self.lost(str(error)) from error
        finally:
            self.waited_s += time.monotonic() - started


def _from(rank: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _slot(content: bytes) -> Tensor:
    """Return the length of a text and its beginning, as SLOT_BYTES bytes."""
    return _as_tensor((_LENGTH.pack(len(content)) + content)[:SLOT_BYTES].ljust(SLOT_BYTES))


def _objects_in(slots: Tensor, *rest: Tensor) -> list[Any]:
    """Parse every rank's JSON text from the gathered slots, and from what follows them if any is longer."""
    return [json.loads(_in_slot(row)[1]) for row in torch.cat([slots, *rest], 1)]


def _in_slot(slot: Tensor) -> tuple[int, bytes]:
    """Return a text's length in bytes, and as much of it as the slot has."""
    content = slot.numpy().tobytes()
    (length,) = _LENGTH.unpack_from(content)
    return length, content[_LENGTH.size : _LENGTH.size + length]


def connect(
    prefix: str,
    timeout_s: float,
    device: Device = HOST,
    resting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Group:
    """Form the group that torchrun's environment describes; a world of one without a launcher.

    `prefix` must be unique per world of a store, e.g. its term.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if size == 1:
        return Group(0, 1, None, timeout_s)
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(f"WORLD_SIZE is {size}, but {', '.join(missing)} is not set: start all ranks with torchrun")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(address, port, None, is_host, timedelta(seconds=timeout_s), wait_for_workers=False)
    except (RuntimeError, TimeoutError) as error:
        raise PeerLostError(f"rank {rank} of {size}: no store at {address}:{port}: {error}") from error
    return Group(rank, size, PrefixStore(f"elastic/{prefix}", store), timeout_s, device, resting=resting)
