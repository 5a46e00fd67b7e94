"""Follow a running job's histories: newest step, commit, world and term.

Only files of the newest term are read, so that a look costs the same after a thousand worlds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from chaos.judge.evidence.run_files import (
    Line,
    number,
    parse_lines,
    part,
    whole,
)

_TICK_NS = 100_000_000


@dataclass(slots=True)
class Followed:
    """State of a running job, from its histories: newest step, commit, world and term."""

    step: int = 0
    loss: float | None = None
    world: int = 0
    term: int = 0
    epoch: int | None = None
    samples_per_s: float | None = None
    commit: int | None = None
    resumed: Line | None = None
    pids: dict[int, int] = field(default_factory=dict)
    sealed_at: float | None = None
    """When the world was sealed, unix seconds. Needed beside the term, which restarts lower after etcd lost its
    data."""
    began_at: float | None = None
    """When the first step was applied, unix seconds."""
    applied_at: float = 0.0
    """When the newest step was applied, unix seconds."""
    _places: dict[str, int] = field(default_factory=dict)
    _listed: int = -1
    _applied_at: float | None = None

    def look(self, folder: Path) -> None:
        """Read what was appended since the last look, in histories of the newest known term or newer ones."""
        history = folder / "history"
        changed = history.stat().st_mtime_ns
        if changed != self._listed:
            # Within one tick of the file system's clock, files may be added without another change of mtime.
            self._listed = changed if time.time_ns() - changed > _TICK_NS else -1
            kept = [name for name in _names(history) if name[:1].isdigit() and _term_of(name) >= self.term]
            self._places = {name: self._places.get(name, 0) for name in sorted(kept)}
        for name, place in self._places.items():
            try:
                with (history / name).open("rb") as file:
                    file.seek(place)
                    content = file.read()
            except FileNotFoundError:
                continue  # the first part of a long history, deleted meanwhile
            end = content.rfind(b"\n") + 1
            self._places[name] = place + end
            for line in parse_lines(content[:end]):
                self._take(line)

    def _take(self, line: Line) -> None:
        term = whole(line, "term")
        if term < self.term or line.get("again"):
            return
        if term > self.term:
            self.pids = {}
        if line["op"] == "form":
            self.pids[whole(line, "rank")] = whole(line, "pid")
            self.sealed_at = number(line, "sealed_at") if line.get("sealed_at") else None
        if line["op"] in ("form", "restore", "step"):
            self.term, self.world = term, whole(line, "world") if "world" in line else self.world
        if line["op"] == "step":
            self._take_step(line)
        elif line["op"] == "restore":
            self.step, self._applied_at = whole(line, "step"), None
            self.resumed = part(line, "resumed") if line["resumed"] else self.resumed
        elif line["op"] == "commit":
            self.commit = whole(line, "step")

    def _take_step(self, line: Line) -> None:
        """Take a step's values; the rate follows from the same rank's previous step."""
        self.step, self.epoch = whole(line, "step"), whole(line, "epoch")
        self.loss = None if line["loss"] is None else number(line, "loss")  # no sample of it has a target
        self.applied_at = number(line, "t")
        self.began_at = self.began_at or self.applied_at
        if line["rank"] == 0:
            at, since = number(line, "t"), self._applied_at
            self.samples_per_s = whole(line, "num_samples") / (at - since) if since and at > since else None
            self._applied_at = at


def _names(history: Path) -> list[str]:
    return [path.name for path in history.iterdir()]


def _term_of(name: str) -> int:
    term = name.partition("-")[0]
    return int(term) if term.isdigit() else 0
