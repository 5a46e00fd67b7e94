"""What a simulated run writes down while it runs: its histories, its result, the witness's counts, its errors."""

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
"""What JSON gives back as it is."""


def _as_kept(value: object) -> object:
    """Return what JSON gives back of a value that holds others."""
    if isinstance(value, list | tuple) and all(isinstance(item, _SIMPLE) for item in value):
        return [*value]
    return json.loads(json.dumps(value))


def named(processes: Sequence[Process]) -> dict[str, Any]:
    """Return what tells processes from all others."""
    pids, born = [process.pid for process in processes], [process.born for process in processes]
    return {"pids": pids, "hosts": [host_of(process.node) for process in processes], "born": born}


class RunRecord:
    """A run's files, and what its histories have said so far: the newest term, its last step, and who leads it."""

    def __init__(self, kernel: Kernel) -> None:
        self.lines: dict[str, list[Line]] = {}
        """The lines of each history, by its name."""
        self.result: Line | None = None
        self.witness: Int64s | None = None
        self.errors: list[str] = []
        self.step = self.term = 0
        self.leader: Process | None = None
        self.on_step: Callable[[int], None] = lambda step: None
        """Called with every step that the newest world has applied."""
        self._kernel = kernel

    @property
    def is_done(self) -> bool:
        return self.result is not None and self.result["status"] == "done"

    def write(self, file: str, op: str, *, at: float | None = None, **fields: object) -> None:
        """Append a line to a history, as JSON would keep it, stamped by the observer's watch if not otherwise."""
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
        """Keep what has ended a process or a node, with its time, for readers of the report."""
        self.errors.append(f"{self._kernel.now:.3f} {whose}: {type(error).__name__}: {error}")

    def take_file(self, path: Path, text: str) -> None:
        """Keep the file that says how the run ended; the product writes no other in this way."""
        if path.name == "result.json":
            self.result = json.loads(text)

    def take_witness(self, counts: Int64s) -> None:
        self.witness = counts
