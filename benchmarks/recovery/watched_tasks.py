"""Paced tasks that record how many models their process has trained, each lane, and each peer that it lost.

A process that survives faults has one model. Lines go to a file that all processes share.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn

from chaos.tasks.paced import Paced
from chaos.tasks.paced_classifier import PacedClassifier
from chaos.tasks.paced_language import PacedLanguage
from elastic_train.errors import PeerLostError
from elastic_train.parallel.point_to_point import PointToPoint


class _Watched(Paced):
    """A paced task with a watch; `seen` is the file."""

    def __init__(self, seen: str, **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        self._seen = Path(seen)

    def _begin_lane(self, model: nn.Module) -> None:
        watch = _watch(self._seen)
        watch.sees(model)
        watch.say("lane")
        super()._begin_lane(model)


class WatchedClassifier(_Watched, PacedClassifier):  # type: ignore[misc]
    """The paced classifier with a watch."""


class WatchedLanguage(_Watched, PacedLanguage):  # type: ignore[misc]
    """The paced language model with a watch."""


@dataclass(slots=True)
class _Watch:
    """This process's watch; `trained` keeps references to all its models, so that no two are confused."""

    path: Path
    trained: list[nn.Module] = field(default_factory=list)

    def sees(self, model: nn.Module) -> None:
        if not any(model is one for one in self.trained):
            self.trained.append(model)
            self.say("model")

    def say(self, what: str) -> None:
        with self.path.open("a") as file:
            line = {"pid": os.getpid(), "what": what, "t": time.time(), "cpu_s": time.process_time()}
            file.write(json.dumps(line) + "\n")


@lru_cache(1)
def _watch(path: Path) -> _Watch:
    """Return this process's watch; from then on it records every wait that ends with a lost peer."""
    watch, lost = _Watch(path), PointToPoint.lost

    def say(group: PointToPoint, why: str) -> PeerLostError:
        watch.say("lost")
        return lost(group, why)

    PointToPoint.lost = say  # type: ignore[method-assign, assignment]
    return watch


def num_models(seen: Path) -> Counter[int]:
    """Return the number of models that each process has trained, by process id."""
    return Counter(line["pid"] for line in _lines(seen.read_text()) if line["what"] == "model")


def given_up_at(seen: str) -> list[tuple[int, float]]:
    """Return the process id and time of each wait that ended with a lost peer, from the text of the watch's file."""
    return [(line["pid"], line["t"]) for line in _lines(seen) if line["what"] == "lost"]


def recovery_cpu_s(seen: Path, lost_at: float, formed_at: float) -> list[float]:
    """Return the seconds of a core that each survivor of a fault took, beyond those of the steps, until its next lane.

    The times are those of the fault and of the next world's beginning.
    """
    lanes = defaultdict[int, list[tuple[float, float]]](list)
    for line in _lines(seen.read_text()):
        if line["what"] == "lane":
            lanes[line["pid"]].append((line["t"], line["cpu_s"]))
    taken = []
    for began in lanes.values():
        times, cpu = zip(*began, strict=True)
        last, following = bisect_right(times, lost_at) - 1, bisect_right(times, formed_at)
        if last >= 0 and following < len(times):
            step_s = statistics.median(after - before for before, after in pairwise(cpu))
            taken.append(cpu[following] - cpu[last] - (following - last) * step_s)
    return taken


def _lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]
