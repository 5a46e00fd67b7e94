"""Paced tasks that record how many models their process has trained, and each peer that it lost.

A process that survives faults has one model. Lines go to a file that all processes share.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

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
        _watch(self._seen).sees(model)
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
            file.write(json.dumps({"pid": os.getpid(), "what": what, "t": time.time()}) + "\n")


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
    return Counter(pid for pid, what, _ in _lines(seen.read_text()) if what == "model")


def given_up_at(seen: str) -> list[tuple[int, float]]:
    """Return the process id and time of each wait that ended with a lost peer, from the text of the watch's file."""
    return [(pid, t) for pid, what, t in _lines(seen) if what == "lost"]


def _lines(text: str) -> list[tuple[int, str, float]]:
    return [(line["pid"], line["what"], line["t"]) for line in map(json.loads, text.splitlines())]
