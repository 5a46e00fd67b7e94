"""`elastic-train ckpt` says what is there, in tables and in JSON, with the right exit code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import safetensors
import torch

from elastic_train.checkpoint.commits.reader import commit_keys
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import Store
from elastic_train.cli.checkpoints import app
from elastic_train.cli.models import export
from elastic_train.errors import CommitError, ConfigError
from tests.elastic_train.checkpoint.commit_samples import commit_steps, trained, writer
from tests.elastic_train.checkpoint.commit_samples import facts as some_facts


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
    """A row says step, term, epoch, age, size, world, metric, validity, and marks head and best."""
    commits = commit_steps(local_store, 1, 2)
    run("pin", local_store.url, "1")
    rows = run_json(capsys, "ls", local_store.url, "--best", "max loss")
    assert isinstance(rows, list)
    assert [row["step"] for row in rows] == [2, 1]
    assert (rows[0]["world"], rows[0]["bytes"], rows[0]["loss"]) == (2, commits[1].num_bytes, 1 / 3)
    assert [row["marks"] for row in rows] == [["head"], ["best", "pinned"]]
    assert all(row["is_valid"] for row in rows)
    assert run("ls", local_store.url) == 0
    printed = capsys.readouterr().out
    assert "head, best" in printed
    assert "in 2 commits" in printed


def test_ls_detects_damage_and_marks_the_commit_to_resume_from(
    local_store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong size is seen at once, a flipped bit with --verify; the head is then the parent."""
    first, second, third = commit_steps(local_store, 1, 2, 3)
    os.truncate(Path(local_store.url) / third.attempt / "__0_0.distcp", 9)
    data = Path(local_store.url) / second.attempt / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    local_store.create("data/step-000000000009/00000001-dead/__0_0.distcp", b"half")

    def marks(*options: str) -> list[tuple[bool, list[str]]]:
        capsys.readouterr()
        run("ls", local_store.url, *options, "--json")
        rows = json.loads(capsys.readouterr().out)
        return [(row["is_valid"], row["marks"]) for row in rows]

    assert marks() == [(False, []), (True, ["head", "best"]), (True, [])]
    assert marks("--verify") == [(False, []), (False, []), (True, ["head", "best"])]
    (Path(local_store.url) / first.key).write_bytes(b"{}")
    assert marks("--verify") == [(False, [])] * 3
    assert run("ls", local_store.url) == 0
    assert "4 B in 1" in " ".join(capsys.readouterr().out.split())


def test_an_empty_run_is_reported_as_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No commits is an error if one is named; a missing folder always is."""
    (tmp_path / "run-1" / "history").mkdir(parents=True)
    assert run("ls", str(tmp_path / "run-1")) == 0
    assert "no commits" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no commits"):
        run("ls", str(tmp_path / "run-1"), "newest")
    with pytest.raises(ConfigError, match=r"this folder does not exist; did you mean '.*run-1'"):
        run("ls", str(tmp_path / "run_1"))


def test_a_run_folder_leads_to_its_commits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's resolved configuration names the place of commits that are elsewhere."""
    (tmp_path / "run").mkdir()
    url = f"memory://{tmp_path.name}"
    (tmp_path / "run" / "config.yaml").write_text(f"checkpoint: {{url: {url}}}")
    commit_steps(open_store(url), 7)
    rows = run_json(capsys, "ls", str(tmp_path / "run"))
    assert isinstance(rows, list)
    assert rows[0]["step"] == 7


@pytest.mark.parametrize("name", ["1", "1-1", "00000001-000000000001", "commits/00000001-000000000001.json"])
def test_a_commit_has_several_names(local_store: Store, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Step, term-step, file name and key all name it."""
    first, _ = commit_steps(local_store, 1, 2)
    shown = run_json(capsys, "ls", local_store.url, name)
    assert isinstance(shown, dict)
    assert (shown["key"], shown["digest"]) == (first.key, first.digest)
    assert run("ls", local_store.url, name) == 0


def test_an_unknown_name_lists_the_known_ones(local_store: Store) -> None:
    """The message names commits that exist."""
    commit_steps(local_store, 1, 2)
    with pytest.raises(ConfigError, match="1-2, 1-1"):
        run("ls", local_store.url, "3")


def test_verify_finds_damage(local_store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """One damaged commit is reported; the code is 65 only when the one asked for, or all of them, are damaged."""
    first, second = commit_steps(local_store, 1, 2)
    os.truncate(Path(local_store.url) / second.attempt / "__0_0.distcp", 9)
    found = run_json(capsys, "ls", local_store.url, "--verify")
    assert isinstance(found, list)
    assert [bool(row["wrong"]) for row in found] == [True, False]
    assert run("ls", local_store.url, "2", "--verify") == CommitError.exit_code
    assert "wrong" in capsys.readouterr().out
    assert run("ls", local_store.url, "1", "--verify") == 0
    os.truncate(Path(local_store.url) / first.attempt / "__0_0.distcp", 9)
    assert run("ls", local_store.url, "--verify") == CommitError.exit_code


def test_prune_keeps_what_a_rule_keeps(local_store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """The command deletes as retention does, says how much, and with --dry-run says it beforehand."""
    first, second, third, _ = commit_steps(local_store, 1, 2, 3, 4)
    run("pin", local_store.url, "1")
    options = ("prune", local_store.url, "--keep-last", "1", "--keep-best", "max loss", "--keep-every-steps", "3")
    rehearsed = run_json(capsys, *options, "--dry-run")
    pruned = run_json(capsys, *options)
    assert rehearsed == pruned
    assert isinstance(pruned, dict)
    assert pruned["commits"] == [second.key]
    assert pruned["bytes"] == second.num_bytes
    run("pin", local_store.url, "1", "--remove")
    pruned = run_json(capsys, "prune", local_store.url, "--keep-last", "4kB")
    assert isinstance(pruned, dict)
    assert pruned["commits"] == [first.key, third.key]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--keep-last", "0"), "at least 1"),
        (("--keep-last", "0GB"), "at least 1"),
        (("--keep-last", "2.0"), "neither a number of commits nor a size"),
        (("--keep-last", " 2"), "neither a number of commits nor a size"),
        (("--keep-every-steps", "0"), "at least 1, not 0"),
        (("--keep-every-steps", "-2"), "at least 1, not -2"),
        (("--keep-every-s", "0"), "more than 0, not 0"),
        (("--keep-every-s", "nan"), "more than 0, not nan"),
        (("--keep-best", "loss"), "write 'min loss'"),
        (("--keep-best", "max macrof1"), "no commit of .* has this metric; they have .*loss"),
        (("--keep-last", "much"), "write 5, 200GB"),
    ],
)
def test_an_invalid_retention_rule_deletes_nothing(local_store: Store, options: tuple[str, str], message: str) -> None:
    """The error says what to write instead."""
    commit_steps(local_store, 1, 2)
    with pytest.raises(ConfigError, match=message):
        run("prune", local_store.url, *options)
    assert len(commit_keys(local_store)) == 2


def test_export_writes_the_weights(local_store: Store, tmp_path: Path) -> None:
    """A plain state dict loads into the model; an existing file is not overwritten."""
    model, _ = trained(1)
    writer(local_store).save({"model": model.state_dict()}, some_facts(1))
    target = tmp_path / "weights.pt"
    assert export(local_store.url, target, to="torch") == 0
    other, _ = trained(0, seed=9)
    other.load_state_dict(torch.load(target, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    with pytest.raises(ConfigError, match="exists already"):
        export(local_store.url, target, to="torch")


def test_export_writes_safetensors(local_store: Store, tmp_path: Path) -> None:
    """They carry the commit's key in their header."""
    model, _ = trained(1)
    record = writer(local_store).save({"model": model.state_dict()}, some_facts(1))
    target = tmp_path / "weights.safetensors"
    assert export(local_store.url, target, to="safetensors") == 0
    with safetensors.safe_open(target, framework="pt") as file:
        assert file.metadata()["commit"] == record.key
        assert torch.equal(file.get_tensor("0.weight"), model.state_dict()["0.weight"])


@pytest.mark.parametrize("command", ["ls", "prune", "pin"])
def test_a_folder_that_is_no_runs_is_refused(tmp_path: Path, command: str) -> None:
    """It was listed as a run without commits, with exit code 0."""
    (tmp_path / "photo.jpg").touch()
    rest = {"pin": ["1"]}.get(command, [])
    with pytest.raises(ConfigError, match=r"is no run's folder.*name a run\.dir"):
        run(command, str(tmp_path), *rest)
