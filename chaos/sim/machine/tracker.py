"""A tracker with faults, and the stand-in for `elastic_train.tracking.mlflow_run.MlflowRun`.

The rest is the product's: local files in a real folder, the thread that sends settled values, the delivery, and
`elastic-train sync`. A call may not arrive, may be executed without an answer, or long after its sender has given up.
Duplicate points are stored once, as in MLflow's database.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from chaos.judge.evidence.run_files import Line, metrics_of
from chaos.sim.machine.kernel import Kernel, Process
from elastic_train.tracking.background_files import LineFile
from elastic_train.tracking.metric_log import MetricsWriter, Values
from elastic_train.tracking.mlflow_run import metric_name
from elastic_train.tracking.mlflow_sync import sync

T = TypeVar("T")

URI = "sim://tracker"
TIMEOUT_S = 5.0
LATE_S = (0.0, 2.0, 20.0)


class TrackingServer:
    """The run's points on the tracker, and whether it answers."""

    def __init__(self, kernel: Kernel, draws: random.Random, delay_s: float) -> None:
        self.kernel, self.draws, self.delay_s = kernel, draws, delay_s
        self.down_until = 0.0
        self.points: dict[tuple[str, int, float, float], None] = {}
        """Name, step, value and time of each point, in order of arrival."""

    def call(self, act: Callable[[], T]) -> T:
        """Call the tracker; while it is down the request or answer is lost, or the request arrives late."""
        kernel = self.kernel
        kernel.sleep(self.draws.expovariate(1 / self.delay_s))
        if kernel.now < self.down_until:
            if self.draws.random() < 0.5:
                kernel.after(self.draws.choice(LATE_S), act)
            kernel.sleep(TIMEOUT_S)
            raise TimeoutError("the tracker does not answer")
        answer = act()
        kernel.sleep(self.draws.expovariate(1 / self.delay_s))
        return answer

    def held(self) -> Line:
        """Return the points of every metric as (step, value)."""
        held: dict[str, list[object]] = {}
        for name, step, value, _ in self.points:
            held.setdefault(name, []).append([step, value])
        return dict(held)


class TrackedRun:
    """The tracker's run, as the product's delivery sees it."""

    run_id = "sim"

    def __init__(self, server: TrackingServer, run_dir: Path, mlflow_uri: str, experiment: str, run_name: str) -> None:
        self._server = server
        server.call(lambda: None)

    def description(self, config: Mapping[str, object], text: str) -> list[Callable[[], None]]:
        return [self.reopen]

    def marks(self) -> dict[str, int]:
        def furthest() -> dict[str, int]:
            marks: dict[str, int] = {}
            for name, step, *_ in self._server.points:
                marks[name] = max(step, marks.get(name, 0))
            return marks

        return self._server.call(furthest)

    def tag(self, tags: Mapping[str, str]) -> None:
        self._server.call(lambda: None)

    def append(self, lines: Sequence[Values]) -> None:
        new = {(metric_name(k), line.step, value, line.t): None for line in lines for k, value in line.by_name.items()}
        self._server.call(lambda: self._server.points.update(new))

    def reopen(self) -> None:
        self._server.call(lambda: None)

    def end(self, status: str, weights_sha256: str | None) -> None:
        self._server.call(lambda: None)


class Lines(LineFile):
    """A term's file, written unbuffered; a killed process closes nothing, so `Tracking` does."""

    def __init__(self, kernel: Kernel, path: Path) -> None:
        self._kernel = kernel
        path.parent.mkdir(exist_ok=True)
        self._open_file = path.open("ab", buffering=0)

    def append(self, line: bytes, again: bytes | None = None) -> None:
        self._kernel.check(self._kernel.current)
        self._open_file.write(line + b"\n")

    def close(self) -> None:
        self._open_file.close()


class Tracking:
    """A job's tracker and metrics folder; only jobs with a tracker have one."""

    def __init__(
        self, kernel: Kernel, draws: random.Random, delay_s: float, make_process: Callable[[int, str], Process]
    ) -> None:
        self.server = TrackingServer(kernel, draws, delay_s)
        self._kernel, self._make_process, self._writers = kernel, make_process, list[Lines]()
        shared = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(prefix="elastic-sim-", dir=shared if shared.is_dir() else None)
        self.folder = Path(self._folder.name)

    def writer(self, lines: LineFile, term: int) -> MetricsWriter:
        self._writers.append(Lines(self._kernel, lines.path))
        return MetricsWriter(self._writers[-1], term)

    def sync(self) -> None:
        """Send what is missing at the end, as a user does with `elastic-train sync`."""
        kernel = self._kernel
        if not list(self.folder.glob("metrics/*")):
            return
        kernel.sleep(max(0.0, self.server.down_until - kernel.now) + TIMEOUT_S + max(LATE_S))
        process = self._make_process(0, "sync")

        def run() -> None:
            sync(self.folder)
            kernel.kill(process)

        process.at_death["sync"] = lambda: kernel.wake(kernel.conductor)
        kernel.spawn(process, run)
        while not process.is_dead:
            kernel.park(TIMEOUT_S)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *error: object) -> None:
        for writer in self._writers:
            writer.close()
        self._folder.cleanup()

    @property
    def metrics(self) -> dict[int, list[Line]]:
        return metrics_of(self.folder)
