"""Stand-ins for `time`, `threading`, `queue`, `uuid`, `random` and `socket`.

They have only what the product uses; anything else raises AttributeError, and so is noticed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty

from chaos.sim.machine.kernel import (
    EPOCH_S,
    TICK_S,
    Kernel,
    Task,
)


class Time:
    """`time` over virtual time; the wall clock is the process's own, which a fault may set."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def time(self) -> float:
        process = self._kernel.current.process
        return EPOCH_S + self._kernel.now + (process.skew_s if process else 0.0)

    def monotonic(self) -> float:
        return self._kernel.now

    def perf_counter(self) -> float:
        return self._kernel.now

    def sleep(self, seconds: float) -> None:
        self._kernel.sleep(seconds)


class SteadyTime(Time):
    """A node's clock with its constant skew only: faults do not move it."""

    def time(self) -> float:
        process = self._kernel.current.process
        return EPOCH_S + self._kernel.now + (self._kernel.skews.get(process.node, 0.0) if process else 0.0)


class SeldomTime(Time):
    """Time for code that polls every second: it polls more rarely here, which only makes it later."""

    def __init__(self, kernel: Kernel, least_s: float) -> None:
        super().__init__(kernel)
        self._least_s = least_s

    def sleep(self, seconds: float) -> None:
        super().sleep(max(seconds, self._least_s))


class Lock:
    """A reentrant lock; waiting tasks are parked."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.holder: Task | None = None
        self.depth = 0
        self._waiting: list[Task] = []

    def acquire(self, timeout: float | None = None) -> bool:
        task, until = self.kernel.current, None if timeout is None else self.kernel.now + max(timeout, TICK_S)
        while self.holder is not None and self.holder is not task and not self._is_orphaned():
            left = None if until is None else until - self.kernel.now
            if left is not None and left <= 0:
                return False
            self._waiting.append(task)
            self.kernel.park(left)
        self.holder, self.depth = task, self.depth + 1
        return True

    def release(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.holder = None
            if self._waiting:
                waiting, self._waiting = self._waiting, []
                for task in waiting:
                    self.kernel.wake(task)

    def _is_orphaned(self) -> bool:
        return self.holder is not None and self.holder.is_done

    def __enter__(self) -> Lock:
        if self.holder is None:
            self.holder, self.depth = self.kernel.current, self.depth + 1
        else:
            self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class Condition(Lock):
    """A condition with its own lock."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._parked: dict[Task, None] = {}  # in order of arrival

    def wait_for(self, fact: Callable[[], bool], timeout: float | None = None) -> bool:
        until = None if timeout is None else self.kernel.now + max(timeout, TICK_S)
        while not (result := fact()):
            left = None if until is None else until - self.kernel.now
            if left is not None and left <= 0:
                return False
            depth, self.depth = self.depth, 1
            task = self.kernel.current
            self._parked[task] = None
            self.release()
            try:
                self.kernel.park(left)
            finally:
                self._parked.pop(task, None)
                self.acquire()
                self.depth = depth
        return result

    def notify_all(self) -> None:
        parked, self._parked = self._parked, {}
        for task in parked:
            self.kernel.wake(task)


class Event:
    """A flag that can be waited for."""

    def __init__(self, kernel: Kernel) -> None:
        self._changed = Condition(kernel)
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._changed.notify_all()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(self.is_set, timeout)


class Threading:
    """The `threading` module: a thread is a task of the process that starts it."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def Lock(self) -> Lock:  # noqa: N802 - the module's own name
        return Lock(self._kernel)

    def Condition(self) -> Condition:  # noqa: N802
        return Condition(self._kernel)

    def Event(self) -> Event:  # noqa: N802
        return Event(self._kernel)

    def Thread(  # noqa: N802
        self, *, target: Callable[..., None], args: Sequence[object] = (), name: str = "", daemon: bool = False
    ) -> Thread:
        assert daemon, f"the thread {name} would keep its process from ending"
        return Thread(self._kernel, target, args)


class Thread:
    def __init__(self, kernel: Kernel, target: Callable[..., None], args: Sequence[object]) -> None:
        self._kernel, self._target, self._args = kernel, target, args

    def start(self) -> None:
        self._kernel.spawn(self._kernel.process, lambda: self._target(*self._args))


class Queue:
    """The `queue` module's `SimpleQueue`."""

    def __init__(self, kernel: Kernel) -> None:
        self._changed = Condition(kernel)
        self._items: deque[object] = deque()

    def put(self, item: object) -> None:
        self._items.append(item)
        self._changed.notify_all()

    def get(self, timeout: float | None = None) -> object:
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._items), timeout):
                raise Empty
            return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class Unique:
    """`uuid`, only as needed for names."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws

    def uuid4(self) -> Name:
        return Name(f"{self._draws.getrandbits(128):032x}")


class Name:
    def __init__(self, text: str) -> None:
        self.hex = text


class Here:
    """`socket` and `os`, only as needed to identify a process and to connect to a port."""

    def __init__(self, kernel: Kernel, connect: Callable[[str, int], None]) -> None:
        self._kernel, self._connect = kernel, connect

    def gethostname(self) -> str:
        return host_of(self._kernel.process.node)

    def getfqdn(self) -> str:
        return self.gethostname()

    def getpid(self) -> int:
        return self._kernel.process.pid

    def create_connection(self, address: tuple[str, int], timeout: float) -> Connection:
        self._connect(*address)
        return Connection()


class Connection:
    def close(self) -> None:
        """Do nothing."""


def host_of(node: int) -> str:
    return f"node-{node}"
