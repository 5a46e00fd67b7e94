"""When a rank measures its memory, and where it reports it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from elastic_train.insight.memory import facts_of
from elastic_train.insight.page import Facts
from elastic_train.parallel.gradient_sum import OfPart
from elastic_train.tracking.history import History
from elastic_train.training.memory.meter import MemoryWatch, Meter
from tests.elastic_train.tracking.unqueued import Unqueued


class Watched:
    """The memory watch of a rank that holds a tensor, its page, and its log lines."""

    def __init__(self, folder: Path, every_steps: int) -> None:
        self.page, self._folder = Facts(), folder
        self.held: list[OfPart] = [("weights", torch.zeros(25))]
        history = History(Unqueued(), folder, 3, 2)
        self.watch = MemoryWatch(Meter(torch.device("cpu")), lambda: self.held, history, every_steps, self.page)

    def lines(self) -> list[dict[str, object]]:
        paths = (self._folder / "history").glob("00000003-00002-*.jsonl")
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_memory_is_looked_at_after_the_first_step_and_every_so_many(tmp_path: Path) -> None:
    """A world's end adds a line if steps were applied since, so that the last line covers all of them."""
    watched = Watched(tmp_path, every_steps=3)
    watched.watch.say()
    for step in range(11, 17):
        watched.watch.step(step)
    watched.held.append(("sums", torch.zeros(50)))
    watched.watch.say()
    watched.watch.say()
    lines = watched.lines()
    assert [(line["op"], line["step"]) for line in lines] == [("memory", 11), ("memory", 14), ("memory", 16)]
    first, _, last = (facts_of(line) for line in lines)
    assert first is not None and last is not None and first.device == "cpu"
    assert (first.parts["weights"], first.parts["sums"], last.parts["sums"]) == (100, 0, 200)
    assert watched.page.memory == last
