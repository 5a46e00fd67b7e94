"""`elastic-train status` says to a script where a run stands."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import Store
from elastic_train.cli.main import main
from elastic_train.errors import StorageError
from elastic_train.tracking.history import note_failed
from elastic_train.world.claims import term_key
from rendezvous import MemoryStore
from rendezvous.membership.records import Keys, Member, encode
from rendezvous.membership.store import Put
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


def test_a_run_that_stopped_says_why_and_what_to_do(local_store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """`status` keeps its code; that of --why tells a scheduler what to do."""
    commit_steps(local_store, 1, 2)
    folder = Path(local_store.url)
    (folder / "history").mkdir()
    why = "row 7 of train/a.parquet has no label"
    note_failed(folder, exit_code=65, step=2, kind="RowError", why=why, started_at=1.0)
    code, found = said(capsys, str(folder))
    assert (code, found["state"], found["stopped"]["do"]) == (75, "resumable", "fix")  # type: ignore[index]
    assert said(capsys, str(folder), "--why")[0] == 65
    with pytest.raises(SystemExit):
        main(["status", str(folder), "--why"])
    why, do, see = capsys.readouterr().out.splitlines()
    assert "ended with an error: row 7 of train/a.parquet has no label (after step 2" in why
    assert do == "do:  repair or replace what it names; another start would meet it again"
    assert see.startswith(f"see: {folder}/history/failed-00000-")


def test_a_project_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its configuration has the name of the one that a run writes."""
    (tmp_path / "config.yaml").write_text("run: {dir: runs/first}\ndata: {train: nowhere}\n")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "data" / "train").mkdir(parents=True)
    with pytest.raises(SystemExit) as left:
        main(["status", str(tmp_path)])
    assert left.value.code == 2
    assert f"its config.yaml is for the run in {tmp_path}/runs/first; name that" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text(f"run: {{dir: {tmp_path}}}\ndata: {{train: nowhere}}\n")
    assert said(capsys, str(tmp_path))[0] == 75


def test_updates_that_were_left_out_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "left out" not in str(said(capsys, finished(tmp_path / "own", skipped_steps=[]))[1]["why"])
    found = said(capsys, finished(tmp_path / "own", skipped_steps=[[1, 2], [3, 5]]))[1]
    assert "all of its 4 steps are trained; 3 updates were left out because" in str(found["why"])


def test_a_run_that_is_done_has_nothing_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = said(capsys, finished(tmp_path / "own"), "--why")
    stopped = found["stopped"]
    assert isinstance(stopped, dict) and (code, stopped["do"]) == (0, "nothing")
    assert stopped["advice"] == f"elastic-train export {tmp_path}/own --to safetensors writes its weights"


def test_a_store_that_does_not_answer_hides_the_state_of_a_run_and_not_its_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the run has said itself that it is done."""
    folder = tmp_path / "run"
    (folder / "history").mkdir(parents=True)
    (folder / "config.yaml").write_text("checkpoint: {url: 'memory://away'}\n")

    def refuse(store: object, prefix: str) -> None:
        raise StorageError("s3://bucket/run: no answer")

    monkeypatch.setattr("elastic_train.checkpoint.stores.fsspec_store.FsspecStore.list", refuse)
    note_failed(folder, exit_code=65, step=2, kind="RowError", why="row 7 has no label", started_at=1.0)
    code, found = said(capsys, str(folder))
    assert (code, found["state"]) == (1, "unknown") and "no answer" in str(found["why"])
    assert said(capsys, str(folder), "--why")[0] == 65
    finished(folder)
    assert said(capsys, str(folder), "--why")[0] == 0


def test_a_run_whose_newest_commit_is_not_in_its_store_does_not_begin_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the file system of the commits is not mounted."""
    folder = tmp_path / "run"
    (folder / "history").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"checkpoint: {{url: {tmp_path}/gone}}\n")
    assert said(capsys, str(folder))[0] == 75
    note_failed(folder, exit_code=5, step=0, kind="Killed", why="was killed by SIGKILL", started_at=1.0)
    assert "nothing is committed, so it starts at step 0" in str(said(capsys, str(folder))[1]["stopped"])
    (folder / "head.json").write_text(json.dumps({"commit": "commits/00000001-00000002.json", "step": 2}))
    code, found = said(capsys, str(folder))
    assert (code, found["state"]) == (65, "failed") and "is that mounted?" in str(found["why"])
    assert said(capsys, str(folder), "--why")[0] == 65


def test_a_job_that_etcd_knows_members_of_waits(
    local_store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another machine its processes cannot be seen, and a job that waits for nodes writes no line."""
    commit_steps(local_store, 1, 2)
    folder, etcd, keys = Path(local_store.url), MemoryStore(), Keys("job")
    claim = {"run_id": "job", "host": "b", "etcd": "10.0.0.2:2379"}
    local_store.create(term_key(9), json.dumps(claim).encode())
    monkeypatch.setattr("rendezvous.etcd.store.EtcdStore", lambda options, give_up_after_s: etcd)
    assert said(capsys, str(folder), "--why")[0] == 75
    etcd.swap({keys.member("n1.0"): Put(encode(Member("n1.0", "b", "10.0.0.2", 1, 0)))}, {})
    code, found = said(capsys, str(folder), "--why")
    assert code == 0 and "it is waiting: etcd at 10.0.0.2:2379 knows 1 worker of 1 node" in str(found["stopped"])
    with pytest.raises(SystemExit) as left:
        main(["status", str(folder)])
    assert left.value.code == 75 and "why: it is waiting: etcd at" in capsys.readouterr().out, "also without --why"
    local_store.create(term_key(10), json.dumps({**claim, "etcd": "127.0.0.1:2379"}).encode())
    assert said(capsys, str(folder), "--why")[0] == 75, "that is another etcd here"


def test_commits_alone_do_not_tell_why_a_run_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"memory://{tmp_path.name}"
    commit_steps(open_store(url), 1)
    assert said(capsys, url)[0] == 75
    assert said(capsys, url, "--why")[0] == 2
