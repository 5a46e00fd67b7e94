"""What rank 0 says of the rows of all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

from elastic_train.core.coverage import CoverageSums
from elastic_train.insight.phases import RankFacts
from elastic_train.insight.totals import PhaseTotals
from elastic_train.tracking.background_files import BackgroundFiles
from elastic_train.tracking.history import History
from elastic_train.training.result import _phases_of
from elastic_train.training.step_sums import StepSums
from elastic_train.training.watch import Watch

ROW = RankFacts(0.5, 0.0, 1.0, 2.0, 0.25, 0.25, 0.5, 0.0, 0.5, 0.125, 64, 0.001)


def sums(*ranks: RankFacts) -> StepSums:
    return StepSums(0.0, 1.0, CoverageSums(), 0, 0, 0, 0, ranks=ranks)


def test_windows_of_every_ranks_phases_reach_history_tracker_and_result(tmp_path: Path) -> None:
    """Every so many steps, and what is left at a world's end; the result has all, whatever the windows."""
    files, tracker = BackgroundFiles(), MagicMock()
    watch = Watch(History(files, tmp_path, 3, 0), tracker, PhaseTotals(), every_steps=2)
    for step in (7, 8, 9):
        watch.step(step, sums(ROW, ROW._replace(data_s=1.5)))
    session = SimpleNamespace(watch=watch)
    result = _phases_of(session)  # type: ignore[arg-type]
    assert _phases_of(session) == result, "what was said is not said again"  # type: ignore[arg-type]
    assert files.flush(5.0)
    (path,) = (tmp_path / "history").glob("*.jsonl")
    first, last = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["op"], first["step"], first["steps"], last["step"], last["steps"]) == ("phases", 8, 2, 9, 1)
    assert first["seconds"] == [[1.0, 0, 2, 4, 0.5, 0.5, 1, 0, 1, 0.25, 128, 0.001], [3.0, *first["seconds"][0][1:]]]
    (at, values), _ = (call.args for call in tracker.log.call_args_list)
    assert (at, values["time/data_s"], values["time/backward_s"], values["time/hidden_s"]) == (8, 1.0, 2.0, 0.125)
    phases = result["phases"]
    assert isinstance(phases, dict) and (phases["steps"], phases["step_s"]) == (3, 5.5)
    assert phases["seconds"]["data"] == 1.0


def test_only_rank_0_says_so() -> None:
    assert _phases_of(SimpleNamespace(watch=None)) == {}  # type: ignore[arg-type]
