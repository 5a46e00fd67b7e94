"""`elastic-train submit`: what is handed to a scheduler, and what is refused before anything is queued."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from elastic_train.cli.main import main
from elastic_train.cli.places.submit.slurm import SCRIPTS, seconds_of
from tests.conftest import ROOT


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "a job.yaml"
    path.write_text("run: {dir: /runs/a}\ndata: {train: /runs/rows}\n")
    return str(path)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return the exit code, and what was printed."""
    with pytest.raises(SystemExit) as left:
        main(["submit", *arguments])
    assert isinstance(left.value.code, int)
    printed = capsys.readouterr()
    return left.value.code, printed.out, printed.err


def test_the_script_is_that_of_deploy_with_the_jobs_own_lines(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Options come after the script's own, which they override, and arguments survive the shell."""
    more = ("--time", "1-2:30", "--gpus", "8", "--sbatch=--partition=a", "--sbatch=--qos=b", "--endpoint", "e:1,f:2")
    code, script, _ = said(capsys, "slurm", config, "--nodes", "2:8", *more, "--optimizer.lr", "0.1", "--dry-run")
    assert code == 0
    shipped = (ROOT / "deploy" / "slurm" / "train.sbatch").read_text().splitlines()
    lines = script.splitlines()
    assert [line for line in lines if line in shipped] == shipped
    own = [line for line in lines if line not in shipped]
    assert own == [
        "#SBATCH --nodes=2-8",
        "#SBATCH --time=1-2:30",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --partition=a",
        "#SBATCH --qos=b",
        f"set -- '{config}' --optimizer.lr 0.1",
        "export ETCD=e:1,f:2",
    ]
    assert lines.index(own[0]) > max(
        i for i, line in enumerate(lines) if line.startswith("#SBATCH") and line in shipped
    )
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_an_array_has_as_many_jobs_as_nodes_at_most(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = ("--array", "--endpoint", "e:1", "--id", "q1")
    code, script, _ = said(capsys, "slurm", config, "--nodes", "2:8", *job, "--dry-run")
    assert code == 0
    shipped = (SCRIPTS / "elastic-array.sbatch").read_text().splitlines()
    own = [line for line in script.splitlines() if line not in shipped]
    variables = ["export ETCD=e:1", "export RUN=q1 MIN=2 MAX=8"]
    assert own == ["#SBATCH --array=0-7", "#SBATCH --job-name=q1", f"set -- '{config}'", *variables]


def test_everything_that_is_wrong_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str
) -> None:
    (tmp_path / "bad.yaml").write_text("runn: {}\n")
    wrong = ("--nodes", "8:2", "--time", "2:00", "--gpus", "0", "--array", "--sbatch", "partition=a")
    code, _, errors = said(capsys, "slurm", str(tmp_path / "bad.yaml"), *wrong, "--dry-run")
    assert code == 2
    for part in ("runn", "--nodes", "120 s before its end", "--gpus", "--endpoint", "--id NAME", "partition=a"):
        assert part in errors, part
    code, _, errors = said(capsys, "slurm", config, "--nodes", "2", "--time", "soon", "--id", "x")
    assert (code, "DAYS-HH" in errors, "--id is for --array" in errors) == (2, True, True)


def test_a_cluster_is_not_asked_for_what_pods_cannot_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders that pods do not share, a password in a ConfigMap, names and amounts that Kubernetes refuses."""
    path = tmp_path / "job.yaml"
    uri = "https://me:secret@mlflow.example.com"
    path.write_text(f"run: {{dir: runs/a}}\ndata: {{train: /data/rows}}\ntracking: {{mlflow_uri: '{uri}'}}\n")
    wrong = ("--nodes", "0", "--id", "My_Run", "--cpus", "four", "--memory", "16 GB")
    code, printed, errors = said(capsys, "k8s", str(path), *wrong, "--dry-run")
    assert (code, printed) == (2, "")
    for part in ("--nodes", "'My_Run'", "--image", "'four'", "'16 GB'", "run.dir", "data.train", "the secret mlflow"):
        assert part in errors, part
    assert "secret@" not in errors


def test_without_the_schedulers_program_the_remedy_is_named(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, errors = said(capsys, "slurm", config, "--nodes", "2")
    assert (code, "--dry-run" in errors) == (2, True)
    code, _, errors = said(capsys, "k8s", config, "--nodes", "2", "--id", "a", "--image", "b")
    assert (code, "kubectl is not on PATH" in errors) == (2, True)


def test_what_is_printed_is_what_is_submitted(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the scheduler's own program, whose refusal is passed on."""
    program = tmp_path / "sbatch"
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/given\necho '7;cluster'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert said(capsys, "slurm", config, "--nodes", "2")[:2] == (0, "7\n")
    assert said(capsys, "slurm", config, "--nodes", "2", "--dry-run")[1] == (tmp_path / "given").read_text()
    program.write_text("#!/bin/sh\ncat > /dev/null\necho 'no such partition' >&2\nexit 1\n")
    code, _, errors = said(capsys, "slurm", config, "--nodes", "2")
    assert (code, "no such partition" in errors) == (1, True)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3", 180), ("3:30", 210), ("1:00:00", 3600), ("2-0", 172800), ("1-2:30", 95400), ("0-0:0:5", 5), ("x", None)],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int | None) -> None:
    assert seconds_of(text) == seconds
