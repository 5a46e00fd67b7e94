"""One rank's error ends a world with the same message on all ranks, instead of a closed connection."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from torch import Tensor
from torch.distributed import HashStore

from chaos.tasks.paced_classifier import PacedClassifier
from elastic_train.core.keyed_random import SampleRandom
from elastic_train.errors import DataError, PeerLostError
from elastic_train.parallel.group import Group
from elastic_train.world import agreement
from elastic_train.world.agreement import NUM_READY, heard, say_why
from tests.conftest import PATIENCE_S, start
from tests.elastic_train.training.live.test_live import write_config

BAD = 200
KINDS = {"DataError": DataError, "ValueError": ValueError}


class Choosy(PacedClassifier):
    """Rejects one row of the second epoch, which the inspection before the first step does not find."""

    def __init__(self, *, kind: str, by: int | None = None, **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        self._kind, self._by = KINDS[kind], by

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64], draw: SampleRandom) -> dict[str, Tensor]:  # type: ignore[override]
        if draw.epoch == 1 and (BAD in ids if self._by is None else os.environ["RANK"] == str(self._by)):
            raise self._kind(f"sample {BAD}: its label is a comet")
        return super().collate(rows, ids, draw)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "by", "codes", "sentence"),
    [
        ("DataError", None, {65}, "train: sample 200 (part-1.parquet, row group 5, row 4): its label is a comet"),
        ("ValueError", None, {1}, "ValueError: sample 200: its label is a comet"),
        ("ValueError", 0, {1}, "ValueError: sample 200: its label is a comet"),
    ],
    ids=["an error that names a row", "an unforeseen one", "one of the rank that hosts the store"],
)
def test_all_ranks_end_with_the_sentence_of_the_one_that_found_a_bad_row(
    tmp_path: Path, rows: Path, kind: str, by: int | None, codes: set[int], sentence: str
) -> None:
    """Otherwise two of three ranks would exit with 1 and gloo's message."""
    config = write_config(tmp_path, rows, 60, lane_ms=0.0)
    task = ["--task.path", f"{__name__}:Choosy", "--task.params.kind", kind]
    task += [] if by is None else ["--task.params.by", str(by)]
    done = start([config, *task], num_ranks=3)
    assert set(done.codes) == codes, done.output
    assert sum(sentence in line for line in done.output.splitlines() if "rror: " in line) >= 3, done.output
    assert "gloo" not in done.output and "GLHF" not in done.output, done.output
    if kind == "DataError":
        assert "Traceback" not in done.output, done.output


def test_a_rank_whose_peer_says_nothing_keeps_its_own_error() -> None:
    """A killed peer reports nothing; and a world of one has no peers."""
    group = Group(0, 1, None, 60)
    lost = group.lost("Connection closed by peer")
    assert heard(group, lost) is lost
    group.store = HashStore()
    assert heard(group, lost) is lost
    say_why(group, RuntimeError("no memory"))
    why = heard(group, lost)
    assert isinstance(why, PeerLostError) and str(why) == "rank 0 of 1 has ended: RuntimeError: no memory"


def test_the_rank_that_may_host_the_store_stays_until_all_have_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its peers find no store, and end with an error of the network."""
    store, pauses = HashStore(), threading.Semaphore(0)
    groups: list[Any] = [SimpleNamespace(rank=rank, size=2, store=store, abandon=lambda: None) for rank in range(2)]
    monkeypatch.setattr(agreement, "READY_S", PATIENCE_S)
    monkeypatch.setattr(agreement, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pauses.release()))
    with ThreadPoolExecutor(1) as pool:
        saying = pool.submit(say_why, groups[0], RuntimeError("no memory"))
        assert pauses.acquire(timeout=PATIENCE_S) and not saying.done()
        assert "rank 0 of 2 has ended: RuntimeError: no memory" in str(heard(groups[1], PeerLostError("closed")))
        assert store.add(NUM_READY, 0) == 2
        saying.result(PATIENCE_S)
