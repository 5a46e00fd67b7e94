"""Record of a simulated run: histories, result, the witness's counts, errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chaos.judge.evidence.run_files import Line
from chaos.sim.machine.kernel import EPOCH_S, Kernel, Process
from chaos.sim.machine.stdlib import host_of
from elastic_train.core.arrays import Int64s

_SIMPLE = (str, int, float, type(None))
"""Types that JSON returns unchanged."""


def _as_kept(value: object) -> object:
    """Return a container as JSON would return it."""
    if isinstance(value, list | tuple) and all(isinstance(item, _SIMPLE) for item in value):
        return [*value]
    return json.loads(json.dumps(value))


def named(processes: Sequence[Process]) -> dict[str, Any]:
    """Return what identifies these processes: pids, hosts and start times."""
    pids, born = [process.pid for process in processes], [process.born for process in processes]
    return {"pids": pids, "hosts": [host_of(process.node) for process in processes], "born": born}


class RunRecord:
    """A run's files, and its current state: newest term, its last step, and its leader."""

    def __init__(self, kernel: Kernel) -> None:
        self.lines: dict[str, list[Line]] = {}
        """Lines of each history, by name."""
        self.result: Line | None = None
        self.witness: Int64s | None = None
        self.errors: list[str] = []
        self.step = self.term = 0
        self.leader: Process | None = None
        self.on_step: Callable[[int], None] = lambda step: None
        """Callbacks, called with every step that the newest world applies."""
        self._kernel = kernel

    @property
    def is_done(self) -> bool:
        return self.result is not None and self.result["status"] == "done"

    def write(self, file: str, op: str, /, *, at: float | None = None, **fields: object) -> None:
        """Append a line to a history as JSON would keep it, stamped with `at` or the observer's clock."""
        line: Line = {"op": op, "t": EPOCH_S + self._kernel.now if at is None else at}
        for name, value in fields.items():
            line[name] = value if isinstance(value, _SIMPLE) else _as_kept(value)
        self.lines.setdefault(file, []).append(line)
        if op == "form" and isinstance(line["term"], int) and line["term"] >= self.term:
            self.term = line["term"]
            if line["rank"] == 0:
                self.leader = self._kernel.process
        if op == "step" and line["term"] == self.term and isinstance(line["step"], int):
            self.step = line["step"]
            self.on_step(self.step)

    def add_error(self, whose: str, error: Exception) -> None:
        """Keep the error that ended a process or node, with its time, for the report."""
        self.errors.append(f"{self._kernel.now:.3f} {whose}: {type(error).__name__}: {error}")

    def take_file(self, path: Path, text: str) -> None:
        """Keep result.json; the product writes no other file this way."""
        if path.name == "result.json":
            self.result = json.loads(text)

    def take_witness(self, counts: Int64s) -> None:
        self.witness = counts
