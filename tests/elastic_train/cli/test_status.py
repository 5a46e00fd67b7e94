"""`elastic-train status` says to a script where a run stands."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elastic_train.checkpoint import Store
from elastic_train.cli.main import main
from tests.elastic_train.checkpoint.commit_samples import commit_steps


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    with pytest.raises(SystemExit) as left:
        main(["status", *arguments, "--json"])
    assert isinstance(left.value.code, int)
    printed = capsys.readouterr().out
    return left.value.code, json.loads(printed) if printed else {}


def test_a_run_is_resumable_until_it_is_done(
    local_store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named by its folder or by its configuration; a result that commits have outgrown is an older one's."""
    folder = Path(local_store.url)
    folder.mkdir(exist_ok=True)
    config = tmp_path / "config.yaml"
    config.write_text(f"run: {{dir: {folder}}}\ndata: {{train: nowhere}}\n")
    assert said(capsys, str(folder))[0] == 2, "nothing says that it is a run's"
    code, found = said(capsys, str(config))
    assert (code, found["state"], found["step"]) == (75, "resumable", None)
    commit_steps(local_store, 1, 2)
    for name in (folder, config):
        code, found = said(capsys, str(name))
        assert (code, found["state"], found["step"]) == (75, "resumable", 2)
    (folder / "result.json").write_text(json.dumps({"status": "preempted", "step": 2}))
    assert said(capsys, str(folder))[0] == 75
    (folder / "result.json").write_text(json.dumps({"status": "done", "step": 2}))
    code, found = said(capsys, str(folder))
    assert (code, found["state"], found["step"], found["exit_code"]) == (0, "done", 2, 0)
    (folder / "result.json").write_text(json.dumps({"status": "done", "step": 1}))
    assert said(capsys, str(folder))[0] == 75


def finished(folder: Path, **fields: object) -> str:
    """Write how a run in a folder ended; return the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "result.json").write_text(json.dumps({"status": "done", "step": 4, "epochs": 2, **fields}))
    return str(folder)


def test_the_run_is_the_one_that_the_jobs_line_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch script asks with all its arguments; it took the configuration's run, which another job had finished."""
    own, other = finished(tmp_path / "own"), str(tmp_path / "other")
    Path(other).mkdir()
    config = tmp_path / "config.yaml"
    config.write_text(f"run: {{dir: {own}}}\ndata: {{train: nowhere}}\nepochs: 2\n")
    flags = ("--grace-s", "60", "--no-compact", "--id", "q", "--nodes=1:64", "--ranks", "2")
    assert said(capsys, str(config))[0] == 0
    assert said(capsys, str(config), *flags, "--batch.micro-batch", "8")[0] == 0
    assert said(capsys, str(config), "--run.dir", other, *flags)[0] == 75
    config.write_text(f"run: {{dir: {other}}}\ndata: {{train: nowhere}}\nepochs: 2\n")
    assert said(capsys, str(config), *flags, f"--run.dir={own}")[0] == 0
    assert said(capsys, own, *flags)[0] == 0
    assert said(capsys, own, "--run.dir", other)[0] == 2, "a folder has no keys"
    assert said(capsys, str(config), "--run.dirr", other)[0] == 2


@pytest.mark.parametrize(
    ("fields", "keys", "code"),
    [
        ({}, ("--epochs", "2"), 0),
        ({}, ("--epochs", "1"), 0),
        ({}, ("--epochs", "3"), 75),
        ({}, ("--max-steps", "4", "--epochs", "3"), 0),
        ({}, ("--max-steps", "5"), 75),
        ({"epochs": 0}, ("--max-steps", "4"), 0),
        ({"ended_by": "early stopping"}, ("--epochs", "3"), 0),
    ],
)
def test_a_longer_job_is_not_done_where_a_shorter_one_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, object], keys: tuple[str, ...], code: int
) -> None:
    """It may have failed before its first step, and what the run's folder says is the shorter one's."""
    own = finished(tmp_path / "own", **fields)
    config = tmp_path / "config.yaml"
    config.write_text(f"run: {{dir: {own}}}\ndata: {{train: nowhere}}\n")
    assert said(capsys, str(config), *keys)[0] == code
    assert said(capsys, own)[0] == 0, "nothing says what it was to be"


def test_a_run_without_a_whole_commit_has_failed(local_store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """While one is whole, training goes on from that."""
    first, second = commit_steps(local_store, 1, 2)
    os.truncate(Path(local_store.url) / second.attempt / "__0_0.distcp", 9)
    assert said(capsys, local_store.url)[1]["step"] == 1
    os.truncate(Path(local_store.url) / first.attempt / "__0_0.distcp", 9)
    code, found = said(capsys, local_store.url)
    assert (code, found["state"]) == (65, "failed")
    assert first.key in str(found["why"])


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, str(tmp_path / "nothing"))[0] == 2


def test_the_first_of_the_errors_with_which_a_run_ended_is_said(
    local_store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until the run goes on."""
    folder = Path(local_store.url)
    commit_steps(local_store, 1, 2)
    history = folder / "history"
    history.mkdir()
    for host, at, why in (("a", 1000.0, "older"), ("a", 2003.0, "a peer is lost"), ("b", 2001.5, "row 7 is damaged")):
        line = {"op": "failed", "t": at, "of_rank": 3, "step": 2, "exit_code": 65, "why": why, "host": host}
        with (history / f"failed-{host}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    own = history / "00000001-00000-0.jsonl"
    own.touch()
    os.utime(own, (2000.0, 2000.0))
    code, found = said(capsys, str(folder))
    assert (code, found["state"]) == (75, "resumable")
    assert found["last_error"] == {
        "at": 2001.5,
        "host": "b",
        "rank": 3,
        "step": 2,
        "exit_code": 65,
        "why": "row 7 is damaged",
    }
    with pytest.raises(SystemExit):
        main(["status", str(folder)])
    assert "(exit code 65, 1970-01-01 00:33:21 UTC on b, rank 3, after step 2): row 7" in capsys.readouterr().out
    os.utime(own, (2100.0, 2100.0))
    assert said(capsys, str(folder))[1]["last_error"] is None
