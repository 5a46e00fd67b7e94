"""One rank's error ends a world with the same message on all ranks, instead of a closed connection."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from torch import Tensor
from torch.distributed import HashStore

from chaos.tasks.paced_classifier import PacedClassifier
from elastic_train.core.sample_random import SampleRandom
from elastic_train.errors import DataError, PeerLostError
from elastic_train.parallel.group import Group
from elastic_train.world.agreement import heard, say_why
from tests.conftest import start
from tests.elastic_train.training.live.test_live import write_config

pytestmark = pytest.mark.slow

BAD = 200
KINDS = {"DataError": DataError, "ValueError": ValueError}


class Choosy(PacedClassifier):
    """Rejects one row of the second epoch, which the inspection before the first step does not find."""

    def __init__(self, *, kind: str, **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        self._kind = KINDS[kind]

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64], draw: SampleRandom) -> dict[str, Tensor]:  # type: ignore[override]
        if draw.epoch == 1 and BAD in ids:
            raise self._kind(f"sample {BAD}: its label is a comet")
        return super().collate(rows, ids, draw)


@pytest.mark.parametrize(
    ("kind", "codes", "sentence"),
    [
        ("DataError", {65}, "train: sample 200 (part-1.parquet, row group 5, row 4): its label is a comet"),
        ("ValueError", {1}, "ValueError: sample 200: its label is a comet"),
    ],
    ids=["an error that names a row", "an unforeseen one"],
)
def test_all_ranks_end_with_the_sentence_of_the_one_that_found_a_bad_row(
    tmp_path: Path, rows: Path, kind: str, codes: set[int], sentence: str
) -> None:
    """Otherwise two of three ranks would exit with 1 and gloo's message."""
    config = write_config(tmp_path, rows, 60, lane_ms=0.0)
    task = ("--task.path", f"{__name__}:Choosy", "--task.params.kind", kind)
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
    group._store = HashStore()
    assert heard(group, lost) is lost
    say_why(group, RuntimeError("no memory"))
    why = heard(group, lost)
    assert isinstance(why, PeerLostError) and str(why) == "rank 0 of 1 has ended: RuntimeError: no memory"
