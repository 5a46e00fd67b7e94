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
    code, found = said(capsys, str(folder))
    assert (code, found["state"], found["step"]) == (75, "resumable", None)
    commit_steps(local_store, 1, 2)
    config = tmp_path / "config.yaml"
    config.write_text(f"run: {{dir: {folder}}}\ndata: {{train: nowhere}}\n")
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
