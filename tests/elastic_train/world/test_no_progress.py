"""Stopping by histories: only worlds that ended processes count, and the message says where to look."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic_train.errors import NoProgressError
from elastic_train.job.plan import Plan
from elastic_train.parallel.group import Group
from elastic_train.tracking import history
from elastic_train.tracking.history import History
from elastic_train.tracking.history_files import Stagnation
from elastic_train.world.no_progress import check_progress
from elastic_train.world.world import World
from tests.elastic_train.tracking.unqueued import Unqueued

WORLDS = 6
CONFIG = SimpleNamespace(give_up_after_worlds=WORLDS, data=SimpleNamespace(validation="rows/validation"))
PLAN: Plan = SimpleNamespace(config=CONFIG)  # type: ignore[assignment]


def world_after(folder: Path, monkeypatch: pytest.MonkeyPatch, *, dies: bool, validates: bool = False) -> World:
    """Return the world after a number of worlds in which a process applied step 3 again, and no later step."""
    for term in range(1, WORLDS + 2):
        monkeypatch.setattr(history, "process_identity", lambda born=term if dies else 0: {"host": "a", "born": born})
        past = History(Unqueued(), folder, term, 0)
        past.form(world=1, cause="lost", joined_at=None, sealed_at=1.0, started_at=2.0)
        past.step(step=3, epoch=0, lo=3, hi=4, lanes=range(4), num_samples=4, world=1, loss=0.5)
        if validates:
            past.validate(step=3)
            past.phases(step=3, steps=1, seconds=[[0.1] * 12] * 64)  # which a world records when it breaks
            past.memory(step=3, facts={"peak": 1})
        past.close()
    term = WORLDS + 2
    group = Group(0, 1, None, 5.0)
    history_ = History(Unqueued(), folder, term, 0)
    return SimpleNamespace(group=group, term=term, history=history_)  # type: ignore[return-value]


def test_worlds_that_their_processes_outlive_end_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number does not matter: otherwise a network fault of a minute would end the job."""
    found = check_progress(world_after(tmp_path, monkeypatch, dies=False), PLAN)
    assert found == Stagnation(WORLDS, 3)


@pytest.mark.parametrize(
    ("validates", "suspect"),
    [
        (False, "points to the samples of the next step or to a device"),
        (True, f"the validation set rows/validation \\({WORLDS} of {WORLDS} worlds ended while they validated\\)"),
    ],
)
def test_worlds_that_end_their_processes_end_the_job_and_the_suspect_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validates: bool, suspect: str
) -> None:
    world = world_after(tmp_path, monkeypatch, dies=True, validates=validates)
    with pytest.raises(NoProgressError, match=suspect):
        check_progress(world, PLAN)
