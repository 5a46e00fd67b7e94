"""`-p tests.forked --forks N`: tests run in N processes that are forked after collection, so all is imported once.

A process is given the next module's tests when it is free; a slow test is given alone, and those of one `xdist_group`
together. The fork shares the modules' memory. A test during which its process ends has failed; a new process runs what
the ended one had left. One that is silent for pytest's `timeout` is ended, with its stacks on standard error: timers of
pytest-timeout would start a thread for each test.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import pytest

Unit = list[int]
"""The indices of tests that one process runs, in order."""
MORE = "more"
"""What a process sends to be given a unit, an empty one if none is left; all else are hooks and their arguments."""
LOOK_EVERY_S = 1.0
"""How often silent processes are looked for."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="number of processes that share the tests")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not session.config.option.forks or session.config.option.collectonly or session.testsfailed:
        return None
    Forks(session).run(session.config.option.forks)
    return True


def units_of(items: list[pytest.Item]) -> deque[Unit]:
    """Return the units of tests, those of groups first: they take longest."""
    units: dict[object, Unit] = {}
    for index, item in enumerate(items):
        group = item.get_closest_marker("xdist_group")
        alone = item if item.get_closest_marker("slow") else item.path
        units.setdefault(group.args[0] if group else alone, []).append(index)
    return deque(sorted(units.values(), key=lambda unit: items[unit[0]].get_closest_marker("xdist_group") is None))


class Fork:
    """A process that runs tests, seen from the one that collected them."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid, self.pipe = pid, pipe
        self.given: deque[int] = deque()
        """The tests that it has been given and not finished."""
        self.heard_at = time.monotonic()

    def end(self, number: int = 0) -> int:
        """Send it a signal, wait for its end, and return its exit code."""
        if number:
            os.kill(self.pid, number)
        self.pipe.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Forks:
    """The processes, and the tests that none has been given."""

    def __init__(self, session: pytest.Session) -> None:
        self._session, self._config = session, session.config
        self._units, self._names = units_of(session.items), count()
        self._forks: dict[Connection, Fork] = {}
        self._longest_s, self._config._env_timeout = self._config._env_timeout, None  # type: ignore[attr-defined]

    def run(self, num_forks: int) -> None:
        """Run all tests; raise what `-x` and Ctrl-C raise in one process."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        reporter.showfspath = False  # tests of several modules end in turn
        try:
            for _ in range(min(num_forks, len(self._units))):
                self._start()
            while self._forks:
                for pipe in wait(list(self._forks), LOOK_EVERY_S):
                    self._hear(self._forks[pipe])  # type: ignore[index]
                for fork in self._forks.values():
                    if self._longest_s and time.monotonic() - fork.heard_at > self._longest_s:
                        os.kill(fork.pid, signal.SIGABRT)
        finally:
            for fork in self._forks.values():
                fork.end(signal.SIGKILL)

    def _start(self) -> None:
        ours, own = Pipe()
        folder = self._config._tmp_path_factory.getbasetemp() / f"gw{next(self._names)}"  # type: ignore[attr-defined]
        folder.mkdir(mode=0o700)
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            for pipe in (ours, *self._forks):
                pipe.close()
            serve(self._session, own, folder)
        own.close()
        self._forks[ours] = Fork(pid, ours)

    def _hear(self, fork: Fork) -> None:
        try:
            what, said = fork.pipe.recv()
            fork.heard_at = time.monotonic()
            if what == MORE:
                unit = self._units.popleft() if self._units else []
                fork.given += unit
                fork.pipe.send(unit)
                return
        except (EOFError, ConnectionError):
            self._lose(fork)
            return
        self._tell(what, said)
        if what == "pytest_runtest_logfinish":
            fork.given.popleft()

    def _lose(self, fork: Fork) -> None:
        """Take leave of a process; if it had tests left, the one that ran has failed, and another runs the rest."""
        del self._forks[fork.pipe]
        code = fork.end()
        if not fork.given:
            assert code == 0, f"a process ended with code {code} after its last test"
            return
        item = self._session.items[fork.given.popleft()]
        why = f"the test's process ended with code {code}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        self._config.hook.pytest_runtest_logreport(report=report)
        self._config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if fork.given:
            self._units.appendleft(list(fork.given))
        if self._units:
            self._start()

    def _tell(self, name: str, said: dict[str, Any]) -> None:
        hook, session = getattr(self._config.hook, name), self._session
        if name == "pytest_warning_recorded":
            hook.call_historic(kwargs=said)
            return
        if name == "pytest_runtest_logreport":
            said["report"] = self._config.hook.pytest_report_from_serializable(config=self._config, data=said["report"])
        hook(**said)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


def serve(session: pytest.Session, pipe: Connection, folder: object) -> None:
    """Be a forked process: run the units that the pipe brings, and end."""
    code = 1
    try:
        random.seed()  # otherwise all processes would draw the same names
        config, plugins = session.config, session.config.pluginmanager
        config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
        capture = plugins.get_plugin("capturemanager")
        capture.stop_global_capturing()  # its files have one offset for all processes
        capture.start_global_capturing()
        reporter = plugins.unregister(name="terminalreporter")
        plugins.register(SimpleNamespace(_tw=reporter._tw), "terminalreporter")  # for stacks at a timeout
        served = Served(config, pipe)
        plugins.register(served)
        served.run(session)
        atexit._run_exitfuncs()
        code = 0
    except KeyboardInterrupt:
        pass
    except BaseException:  # noqa: BLE001 - nothing of pytest may run here again
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


class Served:
    """Runs tests in a forked process, and sends what the terminal's reporter is to hear."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe
        self._unit: deque[int] = deque()

    def run(self, session: pytest.Session) -> None:
        following = self._next()
        while following is not None:
            item, following = session.items[following], self._next()
            after = None if following is None else session.items[following]
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)

    def _next(self) -> int | None:
        if not self._unit:
            self._send(MORE)
            self._unit.extend(self._pipe.recv())
        return self._unit.popleft() if self._unit else None

    def _send(self, what: str, **said: object) -> None:
        self._pipe.send((what, said))

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        self._send("pytest_runtest_logstart", nodeid=nodeid, location=location)

    def pytest_runtest_logfinish(self, nodeid: str, location: object) -> None:
        self._send("pytest_runtest_logfinish", nodeid=nodeid, location=location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._send("pytest_runtest_logreport", report=data)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: object
    ) -> None:
        kind = warning_message.category
        known = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind  # so it can be sent
        said = warnings.WarningMessage(
            str(warning_message.message),  # type: ignore[arg-type]
            kind if known else Warning,
            warning_message.filename,
            warning_message.lineno,
        )
        self._send("pytest_warning_recorded", warning_message=said, when=when, nodeid=nodeid, location=location)
