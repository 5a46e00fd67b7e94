"""Runs of two ranks whose processes ended, written by those that write a run's folder."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from elastic_train.config.schema import Config
from elastic_train.core.accounting import CoverageSums
from elastic_train.errors import ElasticTrainError
from elastic_train.launch import node
from elastic_train.launch.options import Launch
from elastic_train.tracking import history as history_module
from elastic_train.tracking.history import History, UnformedWorlds, note_failed
from elastic_train.training.run import _note
from elastic_train.training.supervisor import HowFar
from rendezvous.agent.worker_end import await_notes, described, note_end
from tests.elastic_train.tracking.unqueued import Unqueued


class Left:
    """A run of two ranks that took three steps a second, and what its processes leave as they end, in that order."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Write files at once, as they are asked for."""
        monkeypatch.setattr(history_module, "BackgroundFiles", Unqueued)
        (folder / "history").mkdir(parents=True, exist_ok=True)
        self.folder, self.now, self.started_at, self._term = folder, 1000.0, 2.0, 0
        self._rank, self._attempt, self._ahead_s = 0, 0, {0: 0.0, 1: 0.0}
        monkeypatch.setattr(time, "time", lambda: self.now + self._ahead_s[self._rank])
        monkeypatch.setattr(history_module, "process_identity", self._identity)
        self._monkeypatch, self._worlds = monkeypatch, list[History]()

    def _identity(self) -> dict[str, object]:
        return {"host": "ab"[self._rank], "boot": "boot", "born": self._attempt}

    def train(self, *steps: int, started_at: float = 2.0, ranks: Sequence[int] = (0, 1), pace_s: float = 1.0) -> None:
        """Form a world of these machines and apply these steps."""
        self._term += 1
        self._worlds = [History(Unqueued(), self.folder, self._term, rank) for rank in ranks]
        for rank, world in zip(ranks, self._worlds, strict=True):
            self._rank = rank
            world.form(world=len(ranks), cause="begin", joined_at=None, sealed_at=1.0, started_at=started_at)
        for self.step in steps:
            self.now += pace_s
            for rank, world in zip(ranks, self._worlds, strict=True):
                self._rank = rank
                world.step(
                    step=self.step,
                    epoch=0,
                    lo=self.step,
                    hi=self.step + 1,
                    lanes=range(rank, rank + 1),
                    num_samples=1,
                    world=len(ranks),
                    loss=0.5,
                )
        self.now += 1.0

    def anew(self, folder: Path) -> Left:
        """Return a run in another folder that has not taken a step."""
        (folder / "history").mkdir(parents=True)
        return Left(folder, self._monkeypatch)

    def starts_again(self) -> None:
        """Ten seconds later the job is started again, by other processes."""
        self.now += 10.0
        self._attempt, self.started_at = self._attempt + 1, self.now

    def begins_anew(self, *steps: int) -> None:
        """At once other processes form a world."""
        self._attempt, self.started_at = self._attempt + 1, self.now
        self.train(*steps, started_at=self.now)

    def clock_is_late(self, rank: int, seconds: float) -> None:
        self._ahead_s[rank] = -seconds

    def fails(self, rank: int, code: int, why: str, kind: str = "RuntimeError") -> None:
        """A rank says with which error it ends."""
        self.now += 0.1
        self._rank = rank
        self._monkeypatch.setenv("RANK", str(rank))
        note_failed(self.folder, exit_code=code, step=3, kind=kind, why=why, started_at=self.started_at)

    def meets(self, rank: int, error: Exception) -> None:
        """A rank ends with an error, of which the trainer makes what it says."""
        self.now += 0.1
        self._rank = rank
        self._monkeypatch.setenv("RANK", str(rank))
        config = Config.model_validate({"run": {"dir": str(self.folder)}, "data": {"train": "x"}})
        try:
            raise error
        except Exception as met:  # noqa: BLE001 - whatever it is
            _note(met, config, HowFar(), self.started_at)

    def dies(self, rank: int, code: int, how: str | None = None, **more: object) -> None:
        """A rank is killed, and its agent says so, in the file that the rank has named."""
        self.now += 0.1
        self._rank = rank
        who = {"pid": os.getpid(), **self._identity()}
        facts = {"op": "failed", "term": 0, "of_rank": rank, "of_term": self._term, "started_at": self.started_at}
        path = self.folder / "history" / f"failed-{rank:05d}-{who['host']}-boot-1.jsonl"
        note_end({"path": str(path), "facts": {**facts, **who}}, code, how or described(code), **more)
        await_notes()

    def launcher_fails(self, rank: int, error: ElasticTrainError) -> None:
        """The launcher on a machine says with which error it ends."""
        self.now += 0.1
        self._rank = rank

        def refuse(plan: object) -> int:
            raise error

        self._monkeypatch.setattr(node, "_launch", refuse)
        with contextlib.suppress(ElasticTrainError):
            node.launch(cast(Launch, None), str(self.folder))

    def cannot_form(self, rank: int, why: str) -> None:
        """A world does not form, as a rank finds."""
        self.now += 1.0
        self._rank = rank
        UnformedWorlds(Unqueued(), self.folder).note(self._term + 1, rank, 2, why)

    def leaves(self, status: str) -> None:
        """Both ranks end as they were asked to."""
        self.now += 0.1
        for world in self._worlds:
            world.end(status=status, step=self.step, weights_sha256="w", coverage=CoverageSums())
