"""`elastic-train ckpt` says what is there, in tables and in JSON, with the right exit code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import safetensors
import torch
from commit_samples import commit_steps, trained, writer
from commit_samples import facts as some_facts

from elastic_train.checkpoint import Store
from elastic_train.checkpoint.cli import app
from elastic_train.errors import CommitError, ConfigError


def run(*arguments: str) -> int:
    """Run one command and return its code."""
    code = app(list(arguments), result_action="return_value", exit_on_error=False)
    assert isinstance(code, int)
    return code


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> object:
    """Run one command with --json and return what it printed."""
    capsys.readouterr()
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_ls_lists_the_newest_first(local_store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """A row says step, term, epoch, age, size, world and loss."""
    commit_steps(local_store, 1, 2)
    rows = run_json(capsys, "ls", local_store.url)
    assert isinstance(rows, list)
    assert [row["step"] for row in rows] == [2, 1]
    assert rows[0]["world"] == 2
    assert rows[0]["record"] == "sealed"
    assert run("ls", local_store.url) == 0
    assert "commits/" in capsys.readouterr().out


def test_an_empty_run_is_said_to_be_empty(local_store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """No commits is no error for ls, and is one for show."""
    assert run("ls", local_store.url) == 0
    assert "no commits" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no commits"):
        run("show", local_store.url)


@pytest.mark.parametrize("name", ["1", "1-1", "00000001-000000000001", "commits/00000001-000000000001.json"])
def test_a_commit_has_several_names(local_store: Store, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Step, term-step, file name and key all name it."""
    first, _ = commit_steps(local_store, 1, 2)
    shown = run_json(capsys, "show", local_store.url, name)
    assert isinstance(shown, dict)
    assert (shown["key"], shown["digest"]) == (first.key, first.digest)
    assert run("show", local_store.url, name) == 0


def test_an_unknown_name_tells_the_known_ones(local_store: Store) -> None:
    """The message names commits that exist."""
    commit_steps(local_store, 1, 2)
    with pytest.raises(ConfigError, match="1-2, 1-1"):
        run("show", local_store.url, "3")


def test_verify_finds_damage(local_store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """One damaged commit is told; the code is 65 only when the one asked for, or all of them, are damaged."""
    first, second = commit_steps(local_store, 1, 2)
    os.truncate(Path(local_store.url) / second.attempt / "__0_0.distcp", 9)
    found = run_json(capsys, "verify", local_store.url)
    assert isinstance(found, list)
    assert [bool(row["wrong"]) for row in found] == [True, False]
    assert run("verify", local_store.url, "2") == CommitError.exit_code
    assert run("verify", local_store.url, "1") == 0
    os.truncate(Path(local_store.url) / first.attempt / "__0_0.distcp", 9)
    assert run("verify", local_store.url) == CommitError.exit_code


def test_prune_keeps_the_last(local_store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """The command deletes as retention does, and says how much."""
    first, second, _ = commit_steps(local_store, 1, 2, 3)
    pruned = run_json(capsys, "prune", local_store.url, "--keep-last", "1")
    assert isinstance(pruned, dict)
    assert sorted(pruned["commits"]) == [first.key, second.key]
    assert pruned["bytes"] > 0
    with pytest.raises(ConfigError, match="at least 1"):
        run("prune", local_store.url, "--keep-last", "0")


def test_export_writes_the_weights(local_store: Store, tmp_path: Path) -> None:
    """A plain state dict loads into the model; an existing file is not overwritten."""
    model, _ = trained(1)
    writer(local_store).save({"model": model.state_dict()}, some_facts(1))
    target = tmp_path / "weights.pt"
    assert run("export", local_store.url, str(target), "--format", "torch") == 0
    other, _ = trained(0, seed=9)
    other.load_state_dict(torch.load(target, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    with pytest.raises(ConfigError, match="exists already"):
        run("export", local_store.url, str(target), "--format", "torch")


def test_export_writes_safetensors(local_store: Store, tmp_path: Path) -> None:
    """The default format carries the commit's key in its header."""
    model, _ = trained(1)
    record = writer(local_store).save({"model": model.state_dict()}, some_facts(1))
    target = tmp_path / "weights.safetensors"
    assert run("export", local_store.url, str(target)) == 0
    with safetensors.safe_open(target, framework="pt") as file:
        assert file.metadata()["commit"] == record.key
        assert torch.equal(file.get_tensor("0.weight"), model.state_dict()["0.weight"])
