"""Folders of runs whose every second is known, written as histories and metrics are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_train.insight.phases import PHASES

T0 = 1_700_000_000.0
SAMPLES = 64


@dataclass
class Written:
    """A run's folder under construction; times are seconds since T0."""

    folder: Path

    def world(
        self,
        term: int,
        *,
        lo: int,
        steps: Mapping[int, float],
        size: int = 2,
        cause: str = "start",
        started: float = 0.0,
        restored: float = 1.0,
        extra: Sequence[tuple[float, Mapping[str, object]]] = (),
        loss: float = 2.0,
    ) -> None:
        """Write a term's history: `steps` says when each was applied, `extra` has further lines, each with its time."""
        form = {"op": "form", "world": size, "cause": cause, "started_at": T0 + started, "host": "alpha"}
        resumed = {"detect_s": 0.5, "form_s": 0.25, "restore_s": 0.125} if term > 1 else None
        timed: list[tuple[float, Mapping[str, object]]] = [
            (restored - 0.1, form),
            (restored, {"op": "restore", "step": lo, "resumed": resumed}),
            *((at, self.step(step, loss / step)) for step, at in steps.items()),
            *extra,
        ]
        lines = [
            {"t": T0 + at, "term": term, "rank": 0, **line} for at, line in sorted(timed, key=lambda pair: pair[0])
        ]
        self.write(f"history/{term:08d}-00000-{'a' * 12}.jsonl", lines)
        for rank in range(1, size):
            other = {**form, "t": T0 + restored, "term": term, "rank": rank, "host": "beta"}
            self.write(f"history/{term:08d}-{rank:05d}-{'b' * 12}.jsonl", [other])

    def step(self, step: int, loss: float) -> dict[str, object]:
        return {"op": "step", "step": step, "loss": loss, "num_samples": SAMPLES, "world": 2}

    def metrics(self, term: int, begins_at: int, by_step: Mapping[int, float], status: str | None = None) -> None:
        """Write a term's metrics file."""
        lines: list[dict[str, object]] = [
            {"begins_at": begins_at, "intervals": [[1, 0, begins_at]] if begins_at else []}
        ]
        lines += [
            {"step": step, "values": {"train/loss": loss, "train/learning_rate": 0.1}} for step, loss in by_step.items()
        ]
        lines += [{"status": status}] if status else []
        self.write(f"metrics/{term:08d}.jsonl", [{"t": T0, "term": term, **line} for line in lines])

    def config(self, **sections: object) -> None:
        (self.folder / "config.yaml").write_text(json.dumps({"batch": {"global_batch": SAMPLES}, **sections}))

    def write(self, name: str, lines: Sequence[Mapping[str, object]]) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def row(compute_s: float, wait_s: float = 0.0) -> list[float]:
    """Return a rank's columns of a `phases` line."""
    by_phase = {"forward": compute_s / 2, "backward": compute_s / 2, "wait": wait_s}
    return [*(by_phase.get(phase, 0.0) for phase in PHASES), 0.0, 0, 0.0]


def memory(step: int, peak: int, device: str = "cpu", **parts: int) -> dict[str, object]:
    """Return a `memory` line."""
    more = {"program": 50} if device == "cpu" else {"reserved": peak + 10, "host": 5, "host_peak": 2 * peak}
    return {"op": "memory", "step": step, "device": device, "peak": peak, **more, "parts": {"weights": 100, **parts}}


def begin(folder: Path, name: str = "run") -> Written:
    """Make a run's folder with a configuration."""
    (folder / name).mkdir()
    written = Written(folder / name)
    written.config()
    return written


def faulted(folder: Path, name: str = "run") -> Written:
    """A run of 100 s: a second to begin, steps of a second, a validation of 4 s, and a fault that undid three steps.

    Term 1 applies 20 steps, of which the 20th ends at 25 s; it validates after the 10th. Term 2 begins with step 17,
    restored at 30 s, and its first step ends at 31.5 s. It applies 60 steps and ends at 92.5 s.
    """
    run = begin(folder, name)
    first = {step: 1.0 + step + (4.0 if step > 10 else 0.0) for step in range(1, 21)}
    second = {17 + place: 30.5 + place for place in range(1, 61)}
    run.world(
        1,
        lo=0,
        steps=first,
        extra=[
            (11.0, {"op": "validate", "step": 10}),
            (20.9, {"op": "commit", "step": 15, "seconds": 2.0, "stall_s": 0.25, "created_at": T0 + 20.5}),
            (16.0, {"op": "phases", "step": 10, "steps": 10, "seconds": [row(2.0), row(4.0)]}),
        ],
    )
    end = {"op": "end", "status": "done", "step": 77, "weights_sha256": "ab" * 32}
    event = {
        "op": "event",
        "kind": "slow_compute",
        "step": 40,
        "since": 30,
        "of_rank": 1,
        "host": "beta",
        "over": False,
    }
    phases = {"op": "phases", "step": 77, "steps": 60, "seconds": [row(20.0, 30.0), row(50.0)]}
    run.world(
        2,
        lo=17,
        cause="lost",
        steps=second,
        restored=30.0,
        extra=[(60.0, {**event, "value": 0.5, "usual": 0.2, "unit": "s"}), (92.0, phases), (92.5, end)],
    )
    run.metrics(1, 0, {step: 2.0 / step for step in first})
    run.metrics(2, 17, {step: 2.0 / step for step in second}, "FINISHED")
    result = {"status": "done", "step": 77, "weights_sha256": "ab" * 32, "num_failed_saves": 1}
    (run.folder / "result.json").write_text(json.dumps(result))
    return run
