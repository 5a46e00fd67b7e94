"""The meeting point of a world's members: a TCPStore hosted by its first seat, a new one for every world.

So a world can never read data that an older one has left there.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from rendezvous.membership.participant import Participant
from rendezvous.membership.rules.decisions import Seal
from rendezvous.membership.worlds import World
from rendezvous.waiting import Bystander, GivenUp

CALL_TIMEOUT_S = 60
RETRY_S = 0.05

_log = logging.getLogger("rendezvous")


class Meeting:
    """One member's side of the meetings of its worlds."""

    def __init__(
        self, participant: Participant, address: str, timeout_s: float, is_broken: Callable[[float], bool]
    ) -> None:
        """`is_broken(waited_s)` ends the wait for others."""
        self._participant, self._address, self._timeout_s, self._is_broken = participant, address, timeout_s, is_broken
        self._hosted: TCPStore | None = None
        self._hosted_for = 0

    def host(self, seal: Seal) -> tuple[str, int]:
        """Start the TCPStore of a world that this member is about to seal; return the address for all of its seats.

        There is one per term, because the first try to seal it may have succeeded although its answer was lost. Raises
        OSError if no store can be started: no port is free, or no file can be opened.
        """
        if self._hosted is None or self._hosted_for != seal.term:
            try:
                self._hosted = TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
            except DistError as error:
                raise OSError(str(error)) from error
            self._hosted_for = seal.term
        return self._address, self._hosted.port

    def connect(self, world: World) -> Store | None:
        """Connect to the TCPStore of a world, or return None as soon as the world has fallen apart."""
        if self._hosted is not None and self._hosted.port == world.port and world.rank_of(self._participant.id) == 0:
            return self._hosted
        started = time.monotonic()
        while (waited_s := time.monotonic() - started) < self._timeout_s and not self._is_broken(waited_s):
            with contextlib.suppress(OSError, DistError, GivenUp):
                socket.create_connection((world.address, world.port), timeout=1.0).close()
                return self._open(world, started)
            time.sleep(RETRY_S)
        _log.warning("the world of term %d broke before all of its members had connected", world.term)
        return None

    def close(self) -> None:
        """Release the hosted store; it lives on while others hold it."""
        self._hosted = None

    def _open(self, world: World, started: float) -> TCPStore:
        """Open the store; its host may have been frozen since its machine answered."""
        timeout = timedelta(seconds=CALL_TIMEOUT_S)
        bystander = Bystander(f"meeting of term {world.term}")
        try:
            return bystander.call(
                lambda: TCPStore(world.address, world.port, is_master=False, timeout=timeout),
                lambda: self._is_broken(time.monotonic() - started),
            )
        finally:
            bystander.leave(lambda: None)
