"""The end of a run on disk: a failed write is reported, but neither fails nor restarts the job."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from elastic_train.checkpoint.commits.record import Improvement
from elastic_train.core.order import Cursor
from elastic_train.errors import ElasticTrainError, FencedError, Preempted, ResultError
from elastic_train.job.model_layout import store_in_memory_order
from elastic_train.job.state import TrainProgress
from elastic_train.system import files
from elastic_train.system.files import write_atomically
from elastic_train.training import supervisor
from elastic_train.training.loop import Outcome
from elastic_train.training.result import EARLY_STOPPING, TrainResult, last_line, result_of, write_result
from elastic_train.training.supervisor import _finish

FULL = OSError(errno.ENOSPC, "No space left on device")


class Ended:
    """A fake session after its last commit, on rank 0, that records the order of the calls that end it."""

    def __init__(self, folder: Path, *, is_live: bool = True, is_launched: bool = True) -> None:
        self.acts: list[str] = []
        self.watch = None
        self.say_rest: Callable[[], object] = lambda: None
        self.finish: Callable[[], object] = lambda: None
        self.pause: Callable[[], object] = lambda: None
        self.check_newest: Callable[[], object] = lambda: None
        run, validation = SimpleNamespace(dir=str(folder)), SimpleNamespace(early_stopping=None)
        task = SimpleNamespace(finish=lambda model, folder: self.finish())
        order = SimpleNamespace(num_epochs=lambda cursor: cursor.epoch)
        data = SimpleNamespace(validation="held")
        config = SimpleNamespace(run=run, validation=validation, checkpoint_url=str(folder), data=data)
        manifest = SimpleNamespace(num_rows=9)
        self.plan = SimpleNamespace(config=config, task=task, manifest=manifest, order=order)
        self.world = SimpleNamespace(
            group=SimpleNamespace(
                rank=0, size=1, all_gather=lambda row: row.unsqueeze(0), close=lambda: self.acts.append("group closed")
            ),
            history=SimpleNamespace(end=lambda **_: self.acts.append("history ended")),
            holders=None,
            term=3,
            check_newest=lambda: self.check_newest(),
            announce=lambda text: self.acts.append(text),
            announce_elsewhere=lambda text: None,
        )
        reached = TrainProgress(step=14, cursor=Cursor(epoch=1))
        shards = SimpleNamespace(acts=self.acts)
        self.state = SimpleNamespace(
            model=nn.Linear(2, 1),
            shards=shards,
            layout=SimpleNamespace(dims={}),
            compiled=None,
            step=14,
            reached=reached,
        )
        self.worlds = SimpleNamespace(
            is_live=is_live,
            is_launched=is_launched,
            leave=lambda *, is_job_done: self.acts.append("job closed" if is_job_done else "left"),
        )
        head = SimpleNamespace(key="commits/a.json")
        self.tracker, self.commits = None, SimpleNamespace(num_failed=0, num_skipped=0, head=head)
        self.loss: float | None = 0.5
        self.leave = SimpleNamespace(name="SIGINT")

    def close(self, status: str) -> None:
        self.acts.append(status)


@pytest.fixture(autouse=True)
def weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what is collective over weights that the fake session does not have."""
    monkeypatch.setattr(supervisor, "digest_of_all", lambda shards, group: "5e1f")
    monkeypatch.setattr(supervisor, "make_whole", lambda shards, column: shards.acts.append("model whole"))


def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the disk reject the result."""

    def refuse(path: Path, text: str) -> None:
        raise FULL

    monkeypatch.setattr("elastic_train.training.result.write_atomically", refuse)


@pytest.mark.parametrize(
    ("is_live", "is_launched", "code"),
    [(True, True, ResultError.exit_code), (False, False, ResultError.exit_code), (False, True, 0)],
    ids=["live", "alone", "restart"],
)
def test_a_job_whose_result_cannot_be_written_is_done(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_live: bool,
    is_launched: bool,
    code: int,
) -> None:
    """The error names file and reason, the job is closed, and no scheduler restarts on the exit code."""
    fill(monkeypatch)
    session = Ended(tmp_path, is_live=is_live, is_launched=is_launched)
    ended = _finish(session, Outcome.DONE)  # type: ignore[arg-type]
    assert (ended.exit_code if isinstance(ended, ResultError) else 0) == code
    assert code or (isinstance(ended, TrainResult) and (ended.status, ended.step) == ("done", 14))
    assert session.acts == ["model whole", "history ended", "FINISHED", "group closed", "job closed"]
    assert capsys.readouterr().err == (
        f"error: step 14 is committed, but the result could not be written: {tmp_path}/result.json: "
        "[Errno 28] No space left on device; make room there and start again: no step is trained twice\n"
    )


def test_a_rank_that_leaves_reports_its_last_steps(tmp_path: Path) -> None:
    """Their time and memory: a rank of the next world reports that after its first step, but this one is in none."""
    session = Ended(tmp_path)
    session.say_rest = lambda: session.acts.append("rest")
    session.pause = lambda: session.acts.append("paused")
    session.world.history.leave = lambda step: session.acts.append(f"left after {step}")
    session.world.group.abandon = lambda: None
    assert isinstance(_finish(session, Outcome.LEFT), Preempted)  # type: ignore[arg-type]
    assert session.acts == ["rest", "left after 14", "paused", "left"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "Done: 14 steps, loss 0.5000, WEIGHTS"),
        ({"metrics": {"loss": 0.25, "auc": 1.0}}, "Done: 14 steps, validation loss 0.2500, WEIGHTS"),
        (
            {"skipped_steps": ((2, 3), (5, 7))},
            (
                "Done: 14 steps, loss 0.5000, 3 updates were left out because the loss or gradient was not finite, or "
                "no sample had a target (see the lines with op nonfinite in FOLDER/history), WEIGHTS"
            ),
        ),
        (
            {"ended_by": EARLY_STOPPING, "improvement": Improvement("min loss", 0.25, best_step=9)},
            (
                "Done: 14 steps (early stopping), loss 0.5000, WEIGHTS; evaluate and export use the best, step 9 "
                "(min loss: 0.2500)"
            ),
        ),
    ],
)
def test_the_last_line_says_what_was_made_and_what_to_do_with_it(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    session = Ended(tmp_path)
    result = _finish(session, Outcome.DONE)  # type: ignore[arg-type]
    assert isinstance(result, TrainResult) and session.acts[3].startswith("Done: 14 steps, loss 0.5000")
    made = said.replace("WEIGHTS", "weights in FOLDER (commits/a.json)").replace("FOLDER", str(tmp_path))
    assert last_line(session, replace(result, **changes)) == (  # type: ignore[arg-type]
        f"{made}, next: elastic-train export {tmp_path} --to safetensors"
    )


@pytest.mark.parametrize(("why", "to"), [(None, ""), ("transformers does not know it", " --to safetensors")])
def test_the_next_command_is_one_that_works(tmp_path: Path, why: str | None, to: str) -> None:
    """A task for transformers models may have another model configured; old validations do not apply to it."""
    session = Ended(tmp_path)
    result = _finish(session, Outcome.DONE)  # type: ignore[arg-type]
    assert isinstance(result, TrainResult)
    session.plan.config.data.validation = None
    session.plan.task = SimpleNamespace(export=lambda *_: None, why_not_exported=lambda: why)
    line = last_line(session, replace(result, metrics={"loss": 0.25}))  # type: ignore[arg-type]
    assert "14 steps, loss 0.5000, weights" in line and line.endswith(f"next: elastic-train export {tmp_path}{to}")


def test_a_rank_asked_to_leave_leaves_even_if_the_result_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code still asks for a requeue, as the commit is complete."""
    fill(monkeypatch)
    session = Ended(tmp_path)
    ended = _finish(session, Outcome.PREEMPTED)  # type: ignore[arg-type]
    assert isinstance(ended, Preempted) and "step 14 is committed" in str(ended)
    assert session.acts == ["history ended", "KILLED", "group closed", "left"]
    assert "result.json: [Errno 28]" in capsys.readouterr().err


def test_a_process_that_was_fenced_off_before_its_result_writes_none(tmp_path: Path) -> None:
    """Frozen since its last commit, it would overwrite a newer term's result."""
    session = Ended(tmp_path)

    def refuse() -> None:
        raise FencedError("term 4 was claimed")

    session.check_newest = refuse
    with pytest.raises(FencedError):
        _finish(session, Outcome.PREEMPTED)  # type: ignore[arg-type]
    assert session.acts == [] and list(tmp_path.iterdir()) == []


def test_a_task_gets_weights_that_other_libraries_can_save(tmp_path: Path) -> None:
    """This includes layers that tensor ranks can cut by columns, which are stored column by column during training."""
    session = Ended(tmp_path)
    model = session.state.model = nn.Linear(2, 3)
    values = model.weight.detach().clone()
    session.state.layout.dims = {"weight": 1}
    store_in_memory_order(model, session.state.layout.dims)
    assert not model.weight.is_contiguous()
    session.finish = lambda: save_file(dict(model.state_dict()), tmp_path / "mine.safetensors")
    assert write_result(session, result_of(session.plan, session.state, "done", "5e1f")) is None  # type: ignore[arg-type]
    assert torch.equal(load_file(tmp_path / "mine.safetensors")["weight"], values)


def test_a_task_that_cannot_write_does_not_cost_the_result(tmp_path: Path) -> None:
    """An OSError in the task's end hook is reported and result.json is written; two errors are reported together."""
    session = Ended(tmp_path)

    def finish() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/exports/model")

    session.finish = finish
    error = write_result(session, result_of(session.plan, session.state, "done", "5e1f"))  # type: ignore[arg-type]
    assert "what the task leaves: [Errno 13] Permission denied: '/exports/model'; make room" in str(error)
    assert json.loads((tmp_path / "result.json").read_text())["step"] == 14
    (tmp_path / "result.json").unlink()
    (tmp_path / "result.json").mkdir()
    error = write_result(session, result_of(session.plan, session.state, "done", "5e1f"))  # type: ignore[arg-type]
    assert "/exports/model" in str(error) and f"{tmp_path}/result.json: [Errno" in str(error)


def test_other_errors_of_the_task_are_raised(tmp_path: Path) -> None:
    """An error that is not about the disk is the task's own failure."""
    session = Ended(tmp_path)

    def finish() -> None:
        raise ElasticTrainError("a mistake")

    session.finish = finish
    with pytest.raises(ElasticTrainError, match="a mistake"):
        write_result(session, result_of(session.plan, session.state, "done", "5e1f"))  # type: ignore[arg-type]


def test_a_draft_that_cannot_be_finished_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old text stays, and the draft is removed."""
    write_atomically(tmp_path / "a", "old")

    def cut_short(path: Path, text: str) -> None:
        path.write_bytes(text[:1].encode())
        raise FULL

    monkeypatch.setattr(files.Path, "write_text", cut_short)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "a", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]
