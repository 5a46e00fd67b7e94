"""Virtual time: one thread runs at a time, in an order determined by the seed.

A task has its own stack (a greenlet) and yields where its code would block, so the product's blocking code runs
unchanged. Between two blocking calls a task runs alone and time stands still: the clock advances to the next queued
event only when no task is ready.

A paused process gets no turn until it is resumed; a dead one gets one more, to raise `Killed` wherever it was. Anything
that a dead process tries afterwards raises the same exception.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

EPOCH_S = 1_800_000_000.0
"""Wall clock at the beginning of virtual time, in unix seconds."""

TICK_S = 1e-6
"""Shortest wait: a wait below the clock's resolution would never end."""
MOST_AT_ONCE = 100_000
"""Most turns within one moment; beyond, a task must be looping without waiting."""


Moment = tuple[float, int]
"""A time and a sequence number, which orders events at the same time."""


class Killed(BaseException):
    """Raised in the tasks of a dead process."""


class Timeless(AssertionError):  # noqa: N818 - what happened to time
    """Time cannot advance: no event is left, or a task loops without waiting."""


class Process:
    """A simulated process: the unit of SIGKILL, SIGSTOP and of a clock."""

    def __init__(self, pid: int, node: int, name: str, born: float = 0.0) -> None:
        self.pid, self.node, self.name, self.born = pid, node, name, born
        self.is_dead = self.is_paused = False
        self.skew_s = 0.0
        self.slowness = 1.0
        self.hangs_until = self.stopped_s = self.stopped_at = 0.0
        self.held: list[Task] = []
        self.device: object = None
        self.listening: Task | None = None
        """The task to wake when the process learns of a membership change."""
        self.tasks: dict[Task, None] = {}  # in start order: a set's order would not follow from the seed
        self.at_resume: list[Callable[[], None]] = []
        self.at_death: dict[str, Callable[[], None]] = {}
        """Callbacks at its death, by name; a new one replaces the old one of its name."""
        self.code: int | None = None

    @property
    def is_running(self) -> bool:
        return not self.is_dead and not self.is_paused


class Task:
    """One thread of a process; `process` is None for the conductor of the simulation itself."""

    def __init__(self, kernel: Kernel, process: Process | None, run: Callable[[], None]) -> None:
        self.kernel, self.process = kernel, process
        self.is_done = self.is_ready = False
        self.deadline: Moment | None = None
        """When the current wait ends; None: it has no limit."""
        self.alarm: Moment | None = None
        """When the queue checks it next, at its deadline or before; None: never."""
        self._run = run
        self.stack: greenlet | None = None
        """Its greenlet; None before its first turn."""

    def run(self) -> None:
        kernel = self.kernel
        try:
            if self.process is None or not self.process.is_dead:
                self._run()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the conductor
            kernel.failure = kernel.failure or error
            kernel.wake(kernel.conductor)
        self.is_done = True
        kernel.forget(self)


class Kernel:
    """The clock, the queue of events, and the task that runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = self._num_turns = 0
        self.failure: BaseException | None = None
        self.skews: dict[int, float] = {}
        """Constant clock skew of some nodes, beside what faults add later."""
        self.processes: dict[Process, None] = {}
        """Processes that have tasks."""
        self.conductor = Task(self, None, lambda: None)
        self.conductor.stack = getcurrent()
        self.current = self.conductor
        self._starter = greenlet(self._start_each)
        self._events: list[tuple[float, int, Any, bool]] = []
        """Heap of a moment, a callback or task, and True if it is a task's alarm."""
        self._ready: deque[Task] = deque()

    @property
    def process(self) -> Process:
        assert self.current.process is not None, "the conductor is not a process"
        return self.current.process

    def at(self, moment: float, act: Callable[[], object]) -> None:
        """Call `act` at a moment; it must not block."""
        self.num_events += 1
        heapq.heappush(self._events, (max(moment, self.now), self.num_events, act, False))

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        self.at(self.now + seconds, act)

    def spawn(self, process: Process | None, run: Callable[[], None]) -> Task:
        """Start a task; it runs at its turn."""
        task = Task(self, process, run)
        if process is not None:
            process.tasks[task] = self.processes[process] = None
        self.wake(task)
        return task

    def forget(self, task: Task) -> None:
        """Drop a task that has ended."""
        process = task.process
        if process is not None:
            process.tasks.pop(task, None)
            if not process.tasks:
                self.processes.pop(process, None)

    def wake(self, task: Task) -> None:
        """Make a task ready; that of a paused process runs once resumed."""
        if task.is_ready or task.is_done:
            return
        task.is_ready = True
        if task.process is not None and task.process.is_paused and not task.process.is_dead:
            task.process.held.append(task)
        else:
            self._ready.append(task)

    def park(self, timeout_s: float | None = None) -> None:
        """Block the running task until it is woken or times out."""
        task = self.current
        if task.process is None or task.process.is_dead:
            self.check(task)
        if timeout_s is not None:
            self.num_events += 1
            task.deadline = self.now + (timeout_s if timeout_s > TICK_S else TICK_S), self.num_events
            if task.alarm is None or task.alarm > task.deadline:
                self._set_alarm(task, task.deadline)
        self.current = following = self._next()
        if following is not task:
            (following.stack or self._starter).switch()
        task.deadline = None
        if task.process is None or task.process.is_dead:
            self.check(task)

    def _set_alarm(self, task: Task, moment: Moment) -> None:
        task.alarm = moment
        heapq.heappush(self._events, (*moment, task, True))

    def _ring(self, task: Task) -> None:
        """Wake a task whose deadline is here, or set its next alarm.

        Most waits end long before their deadline. So a task keeps its alarm for a later deadline, which still has its
        own place in the queue.
        """
        rung, task.alarm = task.alarm, None
        if task.deadline == rung:
            self.wake(task)
        elif task.deadline is not None:
            self._set_alarm(task, task.deadline)

    def check(self, task: Task) -> None:
        """Raise `Killed` in a task of a dead process."""
        if task.process is not None and task.process.is_dead:
            raise Killed
        if task is self.conductor and self.failure is not None:
            raise self.failure

    def sleep(self, seconds: float) -> None:
        until = self.now + max(0.0, seconds)
        self.park(seconds)
        while self.now < until:
            self.park(until - self.now)

    def _give_way(self, mine: Task) -> None:
        """Run the next task; return at the caller's next turn."""
        self.current = following = self._next()
        if following is not mine:
            (following.stack or self._starter).switch()

    def _start_each(self, *_: object) -> None:
        """Start the tasks that have their first turn; a task that ends returns here, and the next one runs.

        All start from this stack: nested in each other, their depth would add up.
        """
        while True:
            task = self.current
            if task.is_done:
                self.current = task = self._next()
            if task.stack is None:
                task.stack = greenlet(task.run, self._starter)
            task.stack.switch()

    def _next(self) -> Task:
        ready, events = self._ready, self._events
        while True:
            while ready:
                task = ready.popleft()
                process = task.process
                if process is not None and process.is_paused and not process.is_dead:
                    process.held.append(task)
                elif not task.is_done:
                    task.is_ready = False
                    self._num_turns += 1
                    if self._num_turns == MOST_AT_ONCE:
                        self.failure = self.failure or Timeless(f"a task loops without waiting at {self.now} s")
                        self.wake(self.conductor)
                    return task
            self._num_turns = 0
            if not events:
                self.failure = self.failure or Timeless("nothing is left to happen")
                self.wake(self.conductor)
                continue
            self.now, number, act, is_alarm = heapq.heappop(events)
            if not is_alarm:
                act()
            elif act.alarm == (self.now, number):
                self._ring(act)

    def kill(self, process: Process) -> None:
        """Kill a process at once: its tasks stop, its connections end."""
        if process.is_dead:
            return
        process.is_dead, process.is_paused = True, False
        acts, process.at_death = process.at_death, {}
        for act in acts.values():
            act()
        for task in process.held:
            task.is_ready = False
        process.held.clear()
        for task in [task for task in process.tasks if task is not self.current]:
            self.wake(task)

    def pause(self, process: Process) -> None:
        if process.is_running:
            process.is_paused, process.stopped_at = True, self.now

    def resume(self, process: Process) -> None:
        if process.is_dead or not process.is_paused:
            return
        process.is_paused = False
        process.stopped_s += self.now - process.stopped_at
        held, process.held = process.held, []
        for task in held:
            task.is_ready = False
            self.wake(task)
        acts, process.at_resume = process.at_resume, []
        for act in acts:
            act()

    def close(self) -> None:
        """End every task; called by the conductor."""
        self.failure = None
        for process in list(self.processes):
            self.kill(process)
        self._events.clear()
        self.after(1.0, lambda: self.wake(self.conductor))
        self._give_way(self.conductor)
