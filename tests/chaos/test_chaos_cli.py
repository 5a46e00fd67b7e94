"""The command line: listing, judging again, exit codes for the verdict, and clear error messages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from chaos import demo
from chaos.cli import main
from chaos.errors import ChaosError
from chaos.planted.catalogue import PLANTED
from chaos.real.runs import clear
from chaos.real.slurm.run import BESIDE
from elastic_train.errors import ConfigError


def leave(arguments: list[str]) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return left.value.code


@pytest.mark.heavy
def test_ls_shows_what_comes_with_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """All scenarios are listed, for people and for programs."""
    assert leave(["ls"]) == 0
    assert "shrink-and-regrow" in capsys.readouterr().out
    assert leave(["ls", "--json"]) == 0
    names = {item["name"] for item in json.loads(capsys.readouterr().out)}
    assert names >= {"demo", "kill-a-rank", "kill-a-node", "shrink-and-regrow", "witness", "slurm-array"}


def test_an_argument_too_many_is_named_with_the_command_that_helps(capsys: pytest.CaptureFixture[str]) -> None:
    """A number after a flag is one, for example."""
    assert leave(["sim", "--cells", "--stages", "3"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "unexpected argument '3'" in shown and "elastic-chaos sim --help" in shown


def test_check_judges_an_old_run_again(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A good run exits with 0, a table, and the command that draws the same steps."""
    assert leave(["check", str(healthy)]) == 0
    shown = capsys.readouterr().out
    assert "VALID" in shown
    assert "elastic-chaos run recorded --seed 7" in shown
    assert leave(["check", str(healthy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["valid"] is True


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("result.json", {"holes": 5}),
        ("result.json", {"holes": [{}]}),
        ("config.yaml", {"parallel": {"shards": "optimizer"}}),
        ("config.yaml", {"parallel": {"tensor": None}}),
    ],
)
def test_a_run_with_values_of_another_kind_has_a_verdict(
    folder: Path, file: str, damage: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    """A torn configuration, for example, ends in the middle of a section: the verdict says so, and is shown."""
    path = folder / "faulted" / file
    path.write_text(json.dumps({**yaml.safe_load(path.read_text()), **damage}))
    assert leave(["check", str(folder)]) == 1
    assert "NOT VALID" in capsys.readouterr().out


def test_check_writes_the_same_report_again(healthy: Path) -> None:
    assert leave(["check", str(healthy)]) == 0
    page = (healthy / "report.html").read_bytes()
    (healthy / "report.html").unlink()
    assert leave(["check", str(healthy)]) == 0
    assert (healthy / "report.html").read_bytes() == page


@pytest.mark.heavy
def test_of_two_jobs_both_have_a_verdict(healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line of JSON each; the exit code is 0 only if both are valid."""
    both = tmp_path / "run"
    shutil.copytree(healthy, both)
    shutil.copytree(healthy, both / BESIDE)
    assert leave(["check", str(both), "--json"]) == 0
    assert [json.loads(line)["valid"] for line in capsys.readouterr().out.splitlines()] == [True, True]
    next(planted for planted in PLANTED if planted.name == "witness-swap").plant(both / BESIDE / "faulted")
    assert leave(["check", str(both), "--json"]) == 1
    assert [json.loads(line)["valid"] for line in capsys.readouterr().out.splitlines()] == [True, False]


@pytest.mark.parametrize("name", ["witness-swap", "no-faults"])
def test_what_is_false_or_unknown_is_not_valid(folder: Path, name: str) -> None:
    """A broken invariant, and one that nothing tested, exit with 1."""
    next(planted for planted in PLANTED if planted.name == name).plant(folder / "faulted")
    assert leave(["check", str(folder)]) == 1
    assert json.loads((folder / "verdict.json").read_text())["valid"] is False


def test_mistakes_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is not a run, a missing scenario, and a setting without a value end with a clear error."""
    assert leave(["check", str(tmp_path)]) == 1
    assert "no faulted/history there" in capsys.readouterr().err
    assert leave(["run", "wittness"]) == 2
    assert "did you mean 'witness'?" in capsys.readouterr().err
    assert leave(["run", "witness", "--out", str(tmp_path), "--set", "epochs"]) == 2
    assert "write key=value" in capsys.readouterr().err
    assert leave(["run", "witness", "--out", str(tmp_path), "--set", "epocs=3"]) == 2
    assert "epochs" in capsys.readouterr().err


def test_a_fault_of_a_missing_cable_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here only the last node has its own cable: a fault of another node's is refused, not applied to the last."""
    scenario = "name: x\ndescription: y\nconfig: configs/witness.yaml\nnodes: {count: 3}\nrows: 64\n"
    (tmp_path / "x.yaml").write_text(f"{scenario}faults: [{{kind: cut_link, node: 0, at_step: 3, for_s: 2}}]\n")
    data = [f"--set=data.{name}={tmp_path / 'rows' / name}" for name in ("train", "validation")]
    assert leave(["run", str(tmp_path / "x.yaml"), "--out", str(tmp_path / "run"), *data]) == 2
    assert "only the last node, 2, has its own cable: say node: 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "command"),
    [
        ("{kind: cut_link, node: 0, at_step: 3, for_s: 2}", []),
        ("{kind: lose_node, node: 0, at_step: 3, for_s: 2}", []),
        ("{kind: cut_link, node: 0, at_step: 3, for_s: 2}", ["--command", "false"]),
    ],
)
def test_a_refused_run_deletes_no_earlier_results(tmp_path: Path, fault: str, command: list[str]) -> None:
    """An earlier run's results remain if the next one cannot start."""
    scenario = f"name: x\ndescription: y\nconfig: configs/witness.yaml\nnodes: {{count: 3}}\nfaults: [{fault}]\n"
    (tmp_path / "x.yaml").write_text(scenario)
    (tmp_path / "run" / "faulted").mkdir(parents=True)
    earlier = [tmp_path / "run" / name for name in ("verdict.json", "report.html", "faulted/result.json")]
    for path in earlier:
        path.touch()
    assert leave(["run", str(tmp_path / "x.yaml"), "--out", str(tmp_path / "run"), *command]) == 2
    assert all(path.exists() for path in earlier)
    clear(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("name", ["faulted", "reference"])
@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_of_somebody_elses_is_not_deleted(
    tmp_path: Path, name: str, is_link: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """--out may be a folder in which a `reference` or a report is no run's; links lead to what is not ours."""
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    (theirs if is_link else out / name).mkdir(parents=True)
    out.mkdir(exist_ok=True)
    if is_link:
        (out / name).symlink_to(theirs)
    kept = [out / name / "notes.txt", out / "report.html"]
    for path in kept:
        path.write_text("mine")
    assert leave(["run", "any-script", "--command", "false", "--out", str(out)]) == 2
    assert f"{out / name}: is no run's folder, and would be deleted; name another --out" in capsys.readouterr().err
    assert [path.read_text() for path in kept] == ["mine", "mine"]


def test_a_place_that_is_no_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file in place of --out's folder is one clear error."""
    (tmp_path / "notes.txt").write_text("mine")
    assert leave(["run", "any-script", "--command", "false", "--out", str(tmp_path / "notes.txt")]) == 1
    assert "notes.txt" in (printed := capsys.readouterr().err) and "Not a directory" in printed
    assert leave(["storm", "--out", str(tmp_path / "notes.txt")]) == 1
    assert "notes.txt: File exists" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("error", [ChaosError("no etcd here"), ConfigError("no etcd here")])
def test_the_demo_reports_its_mistakes(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its failures end with a message and an exit code, not with a traceback."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("chaos.demo.subprocess.run", lambda *_, **__: None)
    monkeypatch.setattr("chaos.demo.cli.run", fail)
    with pytest.raises(SystemExit) as left:
        demo.main(["--json"])
    assert left.value.code == error.exit_code  # type: ignore[attr-defined]
    assert "no etcd here" in capsys.readouterr().err


@pytest.mark.heavy
def test_a_planted_bug_has_to_be_found(capsys: pytest.CaptureFixture[str]) -> None:
    """The canary fails, for people and programs, with the invariant that says why; a wrong name lists all."""
    assert leave(["sim", "--plant", "canary"]) == 1
    assert "found in run 1, by durability" in capsys.readouterr().out
    assert leave(["sim", "--plant", "canary", "--json"]) == 1
    fields = json.loads(capsys.readouterr().out)
    assert fields["valid"] == 0 and fields["invariants"]["durability"] == "false"
    assert leave(["sim", "--plant", "canari"]) == 2
    assert "canary" in capsys.readouterr().err


@pytest.mark.heavy
def test_a_scenario_whose_faults_never_happen_is_not_valid(capsys: pytest.CaptureFixture[str]) -> None:
    """A job that finishes before its faults are due has tested nothing, and says how to run it again."""
    assert leave(["sim", "--scenario", "any-script", "--seed", "1", "--json"]) == 1
    fields = json.loads(capsys.readouterr().out)
    assert (fields["valid"], fields["replay"]) == (0, "elastic-chaos sim --scenario any-script --seed 1")


@pytest.mark.parametrize("name", ["hours", "faults-per-hour", "processes"])
def test_counts_and_rates_below_one_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A rate below zero would never end."""
    assert leave(["sim", "--seeds", "1", f"--{name}", "-1"]) == 2
    assert f"--{name} -1: give more than 0" in capsys.readouterr().err


def test_ctrl_c_prints_how_to_judge_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After everything is stopped the command that judges the rest is printed; without a history there is none."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("chaos.cli.execute", interrupted)
    for is_begun in (False, True):
        if is_begun:
            (tmp_path / "faulted" / "history").mkdir(parents=True)
        with pytest.raises(SystemExit) as left:
            main(["run", "demo", "--out", str(tmp_path)])
        printed = capsys.readouterr().err
        assert left.value.code == 130 and "no process is left running" in printed
        assert (f"elastic-chaos check {tmp_path}" in printed) is is_begun
