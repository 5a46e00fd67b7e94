"""The text classifier, which says how many models its process has trained: one that lives through faults has one."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torch import nn

from chaos.tasks.paced_classifier import PacedClassifier
from elastic_train.tasks.task import Batch, LaneLoss

_trained: list[nn.Module] = []
"""All models that this process has trained, which it holds on to, so that no other one is taken for one of them."""


class WatchedClassifier(PacedClassifier):
    """Appends a line to the file `seen` whenever its process trains a model that it has not trained before."""

    def __init__(self, seen: str, **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        self._seen = Path(seen)

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        if not any(model is one for one in _trained):
            _trained.append(model)
            with self._seen.open("a") as file:
                file.write(json.dumps({"pid": os.getpid(), "num_models": len(_trained)}) + "\n")
        return super().loss(model, batch)


def num_models(seen: Path) -> dict[int, int]:
    """Return how many models each process has trained, by its pid."""
    lines = [json.loads(line) for line in seen.read_text().splitlines()]
    return {line["pid"]: line["num_models"] for line in lines}  # a process's last line has the most
