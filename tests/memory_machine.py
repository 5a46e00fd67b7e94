"""The threads of in-memory ranks, one of which runs at a time; `tests.memory_world` has the exchanges."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from tests.conftest import PATIENCE_S

if TYPE_CHECKING:
    from tests.memory_world import Asked, Hub

T = TypeVar("T")
_machine = threading.local()


class DeadlockError(AssertionError):
    """Every rank waits for another rank."""


class Died(BaseException):
    """This rank is lost; the product must not catch this error."""


def in_memory(
    of_rank: Callable[..., T],
    size: int,
    *arguments: object,
    lose: tuple[int, int] | None = None,
    on_devices: bool = False,
) -> list[T | None]:
    """Run `of_rank(rank, size, *arguments)` for each rank; return the results by rank, None for a lost one.

    `lose` gives a rank and the number of exchanges it completes before it is lost. With `on_devices`, float tensors
    count as device memory. A rank's error is raised here.
    """
    return Machine(size, lose, on_devices=on_devices).run(lambda rank: of_rank(rank, size, *arguments))


def die() -> None:
    """Lose the calling rank."""
    raise Died


def rank_here() -> int | None:
    """Return the calling rank; None on another thread."""
    rank: int | None = getattr(_machine, "rank", None)
    return rank


def let_others_run() -> None:
    """Let every other rank run that can; a no-op outside a machine."""
    if (here := getattr(_machine, "here", None)) is not None:
        here.yield_turn()


def when_all_have_ended(close: Callable[[], None]) -> None:
    """Remove a rank's autograd hooks when all ranks of this machine have ended, as the end of a process would.

    The garbage collector never frees an object that a tensor's hook reaches and that holds the tensor.
    """
    if (here := getattr(_machine, "here", None)) is not None:
        here.closing.append(close)


def machine_here() -> Machine:
    """Return the machine of the calling rank."""
    here: Machine = _machine.here
    return here


class Machine:
    """The threads and their posted messages."""

    def __init__(
        self,
        size: int,
        lose: tuple[int, int] | Mapping[int, int] | None = None,
        *,
        on_devices: bool = False,
        environments: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """`environments` are the additions to `os.environ` of each rank."""
        self.size, self.on_devices = size, on_devices
        self._lose = dict((lose,)) if isinstance(lose, tuple) else dict(lose or {})
        self._environments = environments
        self.changed = threading.Condition(threading.RLock())
        self.hubs: dict[str, Hub] = {}
        self.num_exchanges = [0] * size
        self.queues: list[deque[Asked]] = [deque() for _ in range(size)]
        """Each rank's requested device operations that are not done."""
        self._turn = [_taken() for _ in range(size)]
        self._waits: list[tuple[str, Callable[[], bool]] | None] = [("its turn", lambda: True)] * size
        self._has_ended = [False] * size
        self._failed: BaseException | None = None
        self._all_ended = threading.Event()
        self.closing: list[Callable[[], None]] = []

    def has_ended(self, rank: int) -> bool:
        return self._has_ended[rank]

    def run(self, main: Callable[[int], T]) -> list[T | None]:
        results: list[T | None] = [None] * self.size

        def live(rank: int) -> None:
            self._await_turn(rank)
            _machine.here, _machine.rank = self, rank
            torch.default_generator.manual_seed(0)
            np.random.set_bit_generator(_copy_of(numbers))
            try:
                results[rank] = main(rank)
            except Died:
                pass
            except BaseException as error:  # noqa: BLE001 - raised below
                self._failed = self._failed or error
            self._has_ended[rank] = True
            with self.changed:
                for hub in self.hubs.values():
                    hub.leave_as(rank)
                self.changed.notify_all()
            self._pass_on(rank)

        numbers = np.random.get_bit_generator()
        threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(self.size)]
        with _own_generators():
            for thread in threads:
                thread.start()
            self._turn[0].release()
            self._all_ended.wait()
            for thread in threads:
                thread.join()
        for close in self.closing:
            close()
        if self._failed is not None:
            raise self._failed
        return results

    def count(self, rank: int) -> None:
        """Count an exchange that a rank begins; the rank may be lost at this one."""
        if self._lose.get(rank) == self.num_exchanges[rank]:
            raise Died
        self.num_exchanges[rank] += 1

    def lose_after(self, rank: int, num_exchanges: int) -> None:
        """Lose a rank after that many more exchanges."""
        self._lose[rank] = self.num_exchanges[rank] + num_exchanges

    def wait(self, why: str, can_go: Callable[[], bool]) -> None:
        """Let other ranks run until this one can continue; a thread that is no rank just waits."""
        if getattr(_machine, "here", None) is not self:
            with self.changed:
                assert self.changed.wait_for(can_go, PATIENCE_S), f"a thread waits for {why}"
            return
        if can_go():
            return
        rank = _machine.rank
        with _own_generators():
            self._waits[rank] = why, can_go
            self._pass_on(rank)
            self._await_turn(rank)
            self._waits[rank] = None
        if self._failed is not None:
            raise DeadlockError(str(self._failed)) from self._failed

    def yield_turn(self) -> None:
        """Let every other rank run that can."""
        has_yielded = False

        def can_go() -> bool:
            nonlocal has_yielded
            was, has_yielded = has_yielded, True
            return was

        self.wait("others to run", can_go)

    def _await_turn(self, rank: int) -> None:
        self._turn[rank].acquire()
        if self._environments:
            os.environ.update(self._environments[rank])

    def _pass_on(self, rank: int) -> None:
        """Let the next rank run that can."""
        left = [other for i in range(1, self.size + 1) if not self._has_ended[other := (rank + i) % self.size]]
        if not left:
            self._all_ended.set()
            return
        if (able := self._first_able(left)) is None:
            whys = [f"rank {one} waits for {self._waits[one][0]}" for one in left]  # type: ignore[index]
            self._failed = self._failed or DeadlockError("; ".join(whys))
            able = left[0]
        self._turn[able].release()

    def _first_able(self, left: list[int]) -> int | None:
        """Return the first rank that can run; give time to a rank that waits for one of its threads."""
        deadline = time.monotonic() + PATIENCE_S
        while self._failed is None:
            for rank in left:
                if self._waits[rank][1]():  # type: ignore[index]
                    return rank
            if self._run_devices(left):
                continue
            has_thread = any(self._waits[rank][0].startswith("a call") for rank in left)  # type: ignore[index]
            if not has_thread or time.monotonic() > deadline:
                return None
            with self.changed:
                self.changed.wait(0.001)
        return left[0]

    def _run_devices(self, left: list[int]) -> bool:
        """Run the devices' next operations, whose ranks wait for something else; return True if one has ended."""
        have_ended = False
        for rank in (*left, *left):  # an operation begins in the first round, and may end in the second
            queue = self.queues[rank]
            while queue and queue[0].ends():
                queue.popleft()
                have_ended = True
        return have_ended


def _taken() -> threading.Lock:
    """Return a held lock: it is released once per turn, and a semaphore's conditions cost more than a step."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def _copy_of(generator: np.random.BitGenerator) -> np.random.BitGenerator:
    copy = type(generator)()
    copy.state = generator.state
    return copy


@contextmanager
def _own_generators() -> Iterator[None]:
    """Restore the random generators to their present state on exit.

    numpy's is exchanged as an object: reading and setting its state takes longer than a rank's turn.
    """
    state, numbers, python = torch.get_rng_state(), np.random.get_bit_generator(), random.getstate()
    yield
    torch.set_rng_state(state)
    np.random.set_bit_generator(numbers)
    random.setstate(python)
