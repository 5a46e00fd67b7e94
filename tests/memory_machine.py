"""The threads of ranks in memory, of which one runs at a time; `tests.memory_world` has what they exchange."""

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

if TYPE_CHECKING:
    from tests.memory_world import Asked, Hub

T = TypeVar("T")
PATIENCE_S = 60.0
"""How long a rank may wait for a thread of the product's own that takes part in an exchange."""
_machine = threading.local()


class DeadlockError(AssertionError):
    """Every rank waits for another."""


class Died(BaseException):
    """This rank is lost: nothing in the product may catch it."""


def in_memory(
    of_rank: Callable[..., T],
    size: int,
    *arguments: object,
    lose: tuple[int, int] | None = None,
    on_devices: bool = False,
) -> list[T | None]:
    """Run `of_rank(rank, size, *arguments)` for each rank; return the results by rank, None for one that died.

    `lose` names a rank, and the number of its exchanges that it completes. With `on_devices` what is of floats is taken
    for the memory of a device. An error of a rank is raised here.
    """
    return Machine(size, lose, on_devices=on_devices).run(lambda rank: of_rank(rank, size, *arguments))


def die() -> None:
    """Lose the rank that calls this."""
    raise Died


def rank_here() -> int | None:
    """Return the rank that calls this; None on another thread."""
    rank: int | None = getattr(_machine, "rank", None)
    return rank


def let_others_run() -> None:
    """Let every other rank run that can; outside of a machine there are none."""
    if (here := getattr(_machine, "here", None)) is not None:
        here.yield_turn()


def when_all_have_ended(close: Callable[[], None]) -> None:
    """Let a rank's hooks of autograd go when the ranks of this machine have ended, as those of a process would.

    What is reached from a tensor's hook, and has the tensor, no collector frees.
    """
    if (here := getattr(_machine, "here", None)) is not None:
        here.closing.append(close)


def machine_here() -> Machine:
    """Return the machine of the rank that calls this."""
    here: Machine = _machine.here
    return here


class Machine:
    """The threads, and what they have posted."""

    def __init__(
        self,
        size: int,
        lose: tuple[int, int] | Mapping[int, int] | None = None,
        *,
        on_devices: bool = False,
        environments: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """`environments` are what each rank finds in `os.environ`, besides what all do."""
        self.size, self.on_devices = size, on_devices
        self._lose = dict((lose,)) if isinstance(lose, tuple) else dict(lose or {})
        self._environments = environments
        self.changed = threading.Condition(threading.RLock())
        self.hubs: dict[str, Hub] = {}
        self.num_exchanges = [0] * size
        self.queues: list[deque[Asked]] = [deque() for _ in range(size)]
        """What each rank's device is asked for and has not done."""
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
            torch.manual_seed(0)
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
        """Count an exchange that a rank begins; it may be the one at which the rank is lost."""
        if self._lose.get(rank) == self.num_exchanges[rank]:
            raise Died
        self.num_exchanges[rank] += 1

    def wait(self, why: str, can_go: Callable[[], bool]) -> None:
        """Let other ranks run until this one can; a thread that is no rank just waits."""
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
        """Return the first rank that can run; where one waits for a thread of its own, give that time."""
        deadline = time.monotonic() + PATIENCE_S
        while self._failed is None:
            for rank in left:
                if self._waits[rank][1]():  # type: ignore[index]
                    return rank
            has_thread = any(self._waits[rank][0].startswith("a call") for rank in left)  # type: ignore[index]
            if not has_thread or time.monotonic() > deadline:
                return None
            with self.changed:
                self.changed.wait(0.001)
        return left[0]


def _taken() -> threading.Lock:
    """Return a lock that is held: in a turn it is released once, and a semaphore's conditions cost more than a step."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def _copy_of(generator: np.random.BitGenerator) -> np.random.BitGenerator:
    copy = type(generator)()
    copy.state = generator.state
    return copy


@contextmanager
def _own_generators() -> Iterator[None]:
    """Give the generators back as they are now.

    numpy's is put aside as an object: to read its state and to set it takes longer than a rank's turn.
    """
    state, numbers, python = torch.get_rng_state(), np.random.get_bit_generator(), random.getstate()
    yield
    torch.set_rng_state(state)
    np.random.set_bit_generator(numbers)
    random.setstate(python)
