"""Rank 0's reports on the rows of all ranks, and the actions that follow."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from elastic_train.core.accounting import CoverageSums
from elastic_train.core.mesh import Mesh
from elastic_train.errors import NoProgressError
from elastic_train.insight.detection import Event
from elastic_train.insight.phases import PhaseTotals, RankFacts
from elastic_train.tracking.background_files import BackgroundFiles
from elastic_train.tracking.history import History
from elastic_train.tracking.history_files import host_in
from elastic_train.training import loop
from elastic_train.training.commits import Commits
from elastic_train.training.result import _phases_of
from elastic_train.training.step_sums import STOP, StepSums
from elastic_train.training.watch import Watch
from tests.conftest import PATIENCE_S

ROW = RankFacts(0.5, 0.0, 1.0, 2.0, 0.25, 0.25, 0.5, 0.0, 0.5, 0.125, 64, 0.001)


def sums(*ranks: RankFacts) -> StepSums:
    return StepSums(0.0, 1.0, CoverageSums(), 0, 0, 0, ranks=ranks)


class Said:
    """A watch, and its log lines."""

    def __init__(
        self, folder: Path, every_steps: int = 1000, clock: Callable[[], float] = time.monotonic, **actions: str
    ) -> None:
        self.files, self.tracker, self.folder = BackgroundFiles(), MagicMock(), folder
        self.history = History(self.files, folder, 3, 0)
        self.world = MagicMock(history=self.history, mesh=Mesh(0, 3))
        self.dropped: list[int] = []
        hosts = {1: "n7"}
        self.watch = Watch(
            self.world,
            self.tracker,
            PhaseTotals(),
            every_steps,
            [2, 2, 2],
            actions,  # type: ignore[arg-type]
            hosts.get,
            self.drop,
            clock=clock,
        )

    def drop(self, rank: int) -> str:
        self.dropped.append(rank)
        return f"dropped: node of {rank}"

    def lines(self) -> list[dict[str, Any]]:
        assert self.files.flush(PATIENCE_S)
        (path,) = (self.folder / "history").glob("*.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]


def test_windows_of_every_ranks_phases_reach_history_tracker_and_result(tmp_path: Path) -> None:
    """Every few steps, and the remainder at a world's end; the result covers all steps, whatever the windows."""
    said = Said(tmp_path, every_steps=2)
    for step in (7, 8, 9):
        said.watch.step(step, sums(ROW, ROW._replace(data_s=1.5)), 1.0, 0)
    session: Any = SimpleNamespace(watch=said.watch)
    for _ in range(2):
        said.watch.say()
    result = _phases_of(session)
    first, last = said.lines()
    assert (first["op"], first["step"], first["steps"], last["step"], last["steps"]) == ("phases", 8, 2, 9, 1)
    assert first["seconds"] == [[1.0, 0, 2, 4, 0.5, 0.5, 1, 0, 1, 0.25, 128, 0.001], [3.0, *first["seconds"][0][1:]]]
    (at, values), _ = (call.args for call in said.tracker.log.call_args_list)
    assert (at, values["time/data_s"], values["time/backward_s"], values["time/hidden_s"]) == (8, 1.0, 2.0, 0.125)
    phases = result["phases"]
    assert isinstance(phases, dict) and (phases["steps"], phases["step_s"]) == (3, 5.5)
    assert phases["seconds"]["data"] == 1.0


def test_only_rank_0_says_so() -> None:
    assert _phases_of(SimpleNamespace(watch=None)) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("action", "commits", "stops"), [("tell", 0, 0), ("snapshot", 1, 0), ("stop", 0, 1), ("drop", 0, 0)]
)
def test_a_slow_rank_is_an_event_with_its_evidence_and_what_is_to_follow(
    tmp_path: Path, action: str, commits: int, stops: int
) -> None:
    """The event is in history, log and tracker; a commit is requested once. The host is from the rank's own history."""
    said = Said(tmp_path, slow_compute=action)
    wanted = 0
    for step in range(1, 61):
        slow = ROW._replace(backward_s=9.0) if step > 20 else ROW
        said.watch.step(step, sums(ROW, slow, ROW), 1.0, 0)
        wanted += said.watch.take_wanted_commit()
    assert (wanted, said.watch.wants_to_stop) == (commits, bool(stops))
    assert said.dropped == ([1] if action == "drop" else [])
    events = [line for line in said.lines() if line["op"] == "event" and line["of_rank"] is not None]
    (event,) = events
    assert (event["kind"], event["of_rank"], event["host"], event["over"]) == ("slow_compute", 1, "n7", False)
    assert (event["value"], event["usual"], event["unit"]) == (10.0, 3.0, "s") and event["since"] <= 25 < event["step"]
    shown = [call.args[0] for call in said.world.announce.call_args_list]
    then = {"snapshot": "a commit follows", "stop": "the job ends", "drop": "dropped: node of 1"}.get(action)
    assert event.get("then") == then and any(text.endswith(f"; {then}") for text in shown) == (then is not None)
    assert any(text.startswith("EVENT slow_compute: after step") and "rank 1 on n7:" in text for text in shown)
    assert said.tracker.log.call_args_list[0].args == (event["step"], {"events/slow_compute": 1})


def test_the_log_has_one_line_per_kind_and_minute_and_the_history_all(tmp_path: Path) -> None:
    """A line counts suppressed events and names their ranks; an event with an action is logged at once."""
    now = [0.0]
    said = Said(tmp_path, clock=lambda: now[0], slow_link="snapshot")
    for rank in (0, 2, 1):
        said.watch.tell(Event("slow_data", 30, 20, rank, 0.5, 0.2, " s"))
        said.watch.tell(Event("slow_link", 30, 20, rank, 5.0, 1.0, " ms"))
    shown = [call.args[0] for call in said.world.announce.call_args_list]
    assert len(shown) == 4 and sum(line.startswith("EVENT slow_data: after step 30: rank 0") for line in shown) == 1
    said.world.announce.reset_mock()
    now[0] = 59.0
    said.watch.step(31, sums(ROW, ROW, ROW), 1.0, 0)
    said.world.announce.assert_not_called()
    now[0] = 60.0
    said.watch.step(32, sums(ROW, ROW, ROW), 1.0, 0)
    (line,) = (call.args[0] for call in said.world.announce.call_args_list)
    assert line.startswith("EVENT slow_data: after step 30: rank 1 on n7:")
    assert line.endswith("(1 more since the last line of rank 2: see the history)")
    said.watch.tell(Event("slow_data", 33, 20, 2, 0.5, 0.2, " s"))
    said.watch.say_rest()
    assert "EVENT slow_data: after step 33: rank 2" in said.world.announce.call_args.args[0]
    assert len([line for line in said.lines() if line["op"] == "event"]) == 7
    assert said.watch.num_events == {"slow_data": 4, "slow_link": 3}


def test_a_commit_that_is_asked_for_is_overdue_until_one_begins() -> None:
    """Rank 0 decides; a commit that is due anyway satisfies the request."""
    plan, world, cadence = MagicMock(), MagicMock(is_leader=True), MagicMock()
    cadence.is_overdue.return_value = False
    saves = MagicMock(is_busy=False, is_owed=False)
    commits = Commits(plan, world, MagicMock(), MagicMock(), saves, cadence, None, None, MagicMock())
    assert not commits.is_overdue()
    commits.is_asked = True
    assert commits.is_overdue()
    world.is_leader = False
    assert not commits.is_overdue()


def test_what_an_event_asks_for_as_its_world_ends_is_done_in_the_next(tmp_path: Path) -> None:
    """Flags travel with the next step, which a new member or a fault may keep from coming."""
    said = Said(tmp_path)
    followed = set[str]()
    worlds = [
        Watch(
            said.world, None, PhaseTotals(), 9, [2], {"slow_link": "stop"}, lambda _: None, said.drop, followed=followed
        )
        for _ in range(2)
    ]
    assert not worlds[1].wants_to_stop
    worlds[0].tell(Event("slow_link", 7, 7, 1, 1.0, 0.1, " s"))
    assert worlds[1].wants_to_stop
    owing = MagicMock(is_owed=False)
    commits = Commits(*[MagicMock()] * 4, owing, MagicMock(), None, None, MagicMock())
    commits.is_asked = True
    commits.abandon(is_live=True)
    assert owing.owe.called


def test_a_job_that_an_event_ends_is_committed_first() -> None:
    """One rank's flag stops every rank; exit code 93 keeps schedulers from restarting the job."""
    session = MagicMock()
    with pytest.raises(NoProgressError, match=r"monitoring\.on_event") as error:
        loop._end(session, 0, StepSums(0.0, 1.0, CoverageSums(), 0, 0, STOP))
    assert session.commits.finish.called and error.value.exit_code == 93


def test_the_host_of_a_rank_is_in_its_history(tmp_path: Path) -> None:
    """None if that history is not in this folder, as for a node with a local disk."""
    files = BackgroundFiles()
    history = History(files, tmp_path, 4, 2)
    history.form(world=3, cause="start", joined_at=None, sealed_at=None, started_at=0.0)
    assert files.flush(PATIENCE_S)
    (path,) = (tmp_path / "history").glob("*.jsonl")
    host = json.loads(path.read_text().splitlines()[0])["host"]
    assert (host_in(tmp_path, 4, 2), host_in(tmp_path, 4, 1), host_in(tmp_path, 5, 2)) == (host, None, None)
