"""`elastic-train submit`: what is handed to a scheduler, and what is refused before anything is queued."""

from __future__ import annotations

import math
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from elastic_train.cli.main import main
from elastic_train.cli.places.submit import kubernetes
from elastic_train.cli.places.submit.kubernetes import KubernetesJob
from elastic_train.cli.places.submit.slurm import SCRIPTS, seconds_of
from elastic_train.config import sources
from elastic_train.config.schema import Config
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
    assert "#SBATCH --time=UNLIMITED" in script_of(capsys, config, "--nodes", "2", "--time", "UNLIMITED")
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
        f"set -- '{config}' --nodes 2:8 --optimizer.lr 0.1",
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


def script_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Return the lines of a batch script that no script of deploy has."""
    code, script, errors = said(capsys, "slurm", *arguments, "--dry-run")
    assert code == 0, errors
    shipped = {line for path in SCRIPTS.glob("*.sbatch") for line in path.read_text().splitlines()}
    return [line for line in script.splitlines() if line not in shipped]


def test_the_launchers_flags_are_passed_on(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that the page tells to set were taken for keys of the configuration; MIN counted for an array alone."""
    flags = ("--grace-s", "60", "--ranks=4", "--timeout-s", "100", "--local-addr", "10.0.0.1")
    flags += ("--recovery", "restart", "--no-compact", "--ttl-s", "5", "--max-restarts", "0")
    passed = "--ranks 4 --recovery restart --max-restarts 0 --ttl-s 5.0 --grace-s 60.0"
    passed += " --local-addr 10.0.0.1 --no-compact --timeout-s 100.0 --epochs 2"
    of_job = script_of(capsys, config, "--nodes", "2:8", *flags, "--epochs", "2")
    assert of_job == ["#SBATCH --nodes=2-8", f"set -- '{config}' --nodes 2:8 {passed}"]
    of_any = script_of(capsys, config, "--nodes", "8", *flags, "--epochs", "2")
    assert of_any == ["#SBATCH --nodes=8", f"set -- '{config}' {passed}"], "from one node on, as Slurm's steps"
    array = ("--array", "--endpoint", "e:1", "--id", "q1")
    assert f"set -- '{config}' {passed}" in script_of(capsys, config, "--nodes", "2:8", *array, *flags, "--epochs", "2")
    words = shlex.split(of_any[1].removeprefix("set -- "))
    with pytest.raises(SystemExit):
        main(["launch", words[0], *words[1:], "--nodes", "0"])
    assert capsys.readouterr().err == "error: --nodes must be N or MIN:MAX with 1 <= MIN <= MAX, not '0'\n", (
        "all is known"
    )


def test_what_the_environment_sets_is_in_the_script(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --export=NONE it was checked, and then dropped; a password is not written down, but such a job refused."""
    monkeypatch.setenv("ELASTIC_TRAIN__BATCH__MICRO_BATCH", "4")
    none = ("--nodes", "2", "--sbatch=--export=NONE")
    assert f"set -- '{config}' --batch.micro_batch=4 --epochs 2" in script_of(capsys, config, *none, "--epochs", "2")
    monkeypatch.setenv("ELASTIC_TRAIN__TRACKING__MLFLOW_URI", "postgresql://me:secret@h/m")
    code, _, errors = said(capsys, "slurm", config, *none, "--dry-run")
    assert code == 2 and "would keep tracking.mlflow_uri from the job" in errors and "secret" not in errors
    assert not any("secret" in line for line in script_of(capsys, config, "--nodes", "2"))


def test_an_allocation_that_can_grow_has_a_name_and_an_etcd(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of fewer nodes at first than may train together in the end."""
    grows = ("--id", "quality-1", "--endpoint", "@/shared/etcd.endpoints", "--sbatch=--nodes=2")
    assert script_of(capsys, config, "--nodes", "1:64", *grows) == [
        "#SBATCH --nodes=1-64",
        "#SBATCH --nodes=2",
        f"set -- '{config}' --nodes 1:64 --id quality-1",
        "export ETCD=@/shared/etcd.endpoints",
    ]
    code, _, errors = said(capsys, "slurm", config, "--nodes", "2", "--id", "x")
    assert (code, "--id needs --endpoint HOST:PORT" in errors) == (2, True)


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--comment=a b", '--comment="a b"'),
        ('--comment=say "x"', r'--comment="say \"x\""'),
        ("--comment=it's", '--comment="it\'s"'),
        (r"--comment=a\b", r'--comment="a\\b"'),
        ("--comment=#1", '--comment="#1"'),
        ("--exclusive", "--exclusive"),
        ("--signal=B:USR2@90", "--signal=B:USR2@90"),
        ("--gres=gpu:h100:8", "--gres=gpu:h100:8"),
    ],
)
def test_options_of_sbatch_are_quoted(config: str, capsys: pytest.CaptureFixture[str], option: str, line: str) -> None:
    """A value with a blank was cut off there. (That sbatch reads it so is tested on a real one.)"""
    assert f"#SBATCH {line}" in script_of(capsys, config, "--nodes", "2", f"--sbatch={option}")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("flags", "said_of_it"),
    [
        (("--sbatch=--comment=a\n#SBATCH --partition=b",), "is not an option of sbatch"),
        (("--sbatch=--partition a",), "is not an option of sbatch"),
        (("--sbatch=--ntasks-per-node=8",), "give --ranks and --gpus"),
        (("--sbatch=--no-requeue",), "is requeued to continue"),
        (("--sbatch=--array=0-3",), "give --array"),
        (("--sbatch=--signal=B:USR2@90",), "write --sbatch=--signal=USR1@SECONDS"),
        (("--sbatch=--job-name=a/b",), "no file's name has a '/'"),
        (("--sbatch=-N8",), "with the long name"),
        (("--sbatch=--no-req",), "is requeued to continue"),
        (("--sbatch=--ntasks-per-nod=8",), "give --ranks and --gpus"),
        (("--sbatch=--tasks-per-node=8",), "give --ranks and --gpus"),
        (("--sbatch=--nodes=2",), "each job of an array has one node"),
        (("--sbatch=--time=2",), "120 s before its end"),
        (("--sbatch=--time-min=0:30",), "120 s before its end"),
        (("--sbatch=--wrap=ls",), "the script is the job"),
        (("--sbatch=--wait",), "prints the job's number at once"),
        (("--sbatch=--test-only",), "give --dry-run"),
        (("--sbatch=--signal=USR1@0",), "write --sbatch=--signal=USR1@SECONDS"),
        (("--id", "a" * 201), "1 to 200 printable characters"),
        (("--id", "a\n#SBATCH --partition=b"), "--id 'a\\n#SBATCH --partition=b' names jobs"),
        (("--id", "my job"), "--id 'my job' names jobs"),
        (("--id", "team/q"), "--id 'team/q' names jobs"),
        (("--endpoint", "nope:port"), "--endpoint: etcd's endpoint 'nope:port' is not HOST:PORT"),
        (("--endpoint", "h:²"), "--endpoint: etcd's endpoint 'h:²' is not HOST:PORT"),
        (("--endpoint", "@a,@b"), "--endpoint: a file of endpoints"),
        (("--time", "٣٠:00:00"), "is not MINUTES"),
        (("--time", "30:00:00\n"), "is not MINUTES"),
        (("--recovery", "life"), "--recovery must be one of"),
        (("--grace-s", "-1"), "--grace-s must be a number of seconds"),
    ],
)
def test_nothing_is_passed_on_that_a_script_reads_otherwise(
    config: str, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said_of_it: str
) -> None:
    """A line break began an option of sbatch's that nobody had given."""
    others = ("--array", "--id", "q", "--endpoint", "https://e:1")
    code, printed, errors = said(capsys, "slurm", config, "--nodes", "2", *others, "--dry-run")
    assert code == 0, errors
    left = [
        word for name, word in zip(others[1::2], others[2::2], strict=True) if name != flags[0] for word in (name, word)
    ]
    code, printed, errors = said(capsys, "slurm", config, "--nodes", "2", "--array", *left, *flags, "--dry-run")
    assert (code, printed) == (2, "")
    assert said_of_it in errors and len(errors.splitlines()) == 1, errors


@pytest.mark.parametrize(
    ("flags", "said_of_it"),
    [
        (("--sbatch=--nodes=8",), "--sbatch=--nodes=8 and --nodes 2"),
        (("--time", "30", "--sbatch=--time=60"), "give one of them"),
        (("--time", "10", "--sbatch=--signal=B:USR1@600"), "600 s before its end"),
        (("--gpus", "4", "--sbatch=--gpus-per-node=h100:2"), "and --gpus 4"),
        (("--gpus", "4", "--sbatch=--gres=gpu:2"), "and --gpus 4"),
        (("--gpus", "4", "--sbatch=--gpus=8"), "and --gpus 4"),
        (("--sbatch=--no-kill=off",), "train on when one is lost"),
    ],
)
def test_flags_and_options_that_contradict_each_other_are_refused(
    config: str, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said_of_it: str
) -> None:
    """sbatch would take the last, and the launchers another."""
    code, printed, errors = said(capsys, "slurm", config, "--nodes", "2", *flags, "--dry-run")
    assert (code, printed, len(errors.splitlines())) == (2, "", 1), errors
    assert said_of_it in errors


def test_variables_of_sbatch_are_looked_at_as_its_options(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They win over the script's lines."""
    wrong = {"SBATCH_SIGNAL": "TERM@60", "SBATCH_NO_REQUEUE": "1", "SBATCH_TIMELIMIT": "1", "SBATCH_ARRAY_INX": "0-3"}
    for name, value in (wrong | {"SBATCH_PARTITION": "a", "SBATCH_TIMELIMIT": "60"}).items():
        monkeypatch.setenv(name, value)
    code, _, errors = said(capsys, "slurm", config, "--nodes", "2", "--dry-run")
    assert code == 2
    assert [line.split("=")[0] for line in errors.splitlines()] == [
        "error: SBATCH_ARRAY_INX", "error: SBATCH_NO_REQUEUE", "error: SBATCH_SIGNAL"
    ]  # fmt: skip
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    assert "SBATCH_TIMELIMIT=1: the job is asked to leave" in said(capsys, "slurm", config, "--nodes", "2")[2]


def test_options_that_fit_the_flags_are_passed_on(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also a limit of 0, which is none, and counts that say the same twice."""
    options = ("--sbatch=--gres=gpu:h100:4", "--sbatch=--mem=0", "--sbatch=--time-min=10", "--sbatch=--nodes=2")
    lines = script_of(capsys, config, "--nodes", "1:4", "--gpus", "4", "--time", "0", *options)
    assert lines[:3] == ["#SBATCH --nodes=1-4", "#SBATCH --time=0", "#SBATCH --gpus-per-node=4"]
    assert lines[3:7] == [f"#SBATCH {option.removeprefix('--sbatch=')}" for option in options]


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
    assert (code, "DAYS-HH" in errors, "--id needs --endpoint" in errors) == (2, True, True)
    assert "--nodes N or MIN:MAX is needed" in said(capsys, "slurm", config)[2]


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
    code, _, errors = said(capsys, "k8s", str(path), "--nodes", "1", "--id", "a", "--image", "b", "--gpus", "0")
    assert (code, "--gpus must be at least 1, not 0" in errors) == (2, True)


def out_of_reach(tree: dict[str, object], **more: bool) -> list[str]:
    """Return the first words of what is wrong with a job's configuration."""
    config = Config.model_validate({"run": {"dir": "/runs/a"}, "data": {"train": "/runs/rows"}} | tree)
    job = KubernetesJob(config, "indexed-job", "a", "1:2", "r/e:1", "4", "16Gi", **more)
    return [problem.split()[0] for problem in job.problems()]


@pytest.mark.parametrize(
    ("tree", "keys"),
    [
        ({"run": {"dir": "/runs/../etc"}}, ["run.dir"]),
        ({"run": {"dir": "/runs/./a/../b"}}, []),
        ({"run": {"dir": "/runs"}}, ["run.dir"]),
        ({"data": {"train": "/runs/../data"}}, ["data.train"]),
        ({"data": {"train": "file:///home/me/rows"}}, ["data.train"]),
        ({"data": {"train": "s3://mine/rows", "validation": "/home/me/rows"}}, ["data.validation"]),
        ({"data": {"train": "file:///runs/rows", "cache_dir": "/home/me/cache"}}, ["data.cache_dir"]),
        ({"data": {"train": "/runs/rows", "cache_dir": "/tmp/cache"}, "checkpoint": {"near_dir": "/dev/shm/near"}}, []),
        ({"checkpoint": {"near_dir": "/near"}}, ["checkpoint.near_dir"]),
        ({"checkpoint": {"url": "/home/me/commits"}}, ["checkpoint.url"]),
        ({"checkpoint": {"url": "gs://mine/commits"}}, []),
        ({"task": {"path": "/home/me/task.py:Task"}}, ["task.path"]),
        ({"task": {"path": "mine.task:Task", "params": {"model": {"hf": "~/bert"}}}}, ["task.params.model.hf"]),
        ({"task": {"path": "mine.task:Task", "params": {"model": {"hf": "/models/bert"}}}}, []),
        ({"tracking": {"mlflow_uri": "sqlite:///mlflow.db"}}, ["tracking.mlflow_uri"]),
        ({"tracking": {"mlflow_uri": "sqlite:////runs/mlflow.db"}}, []),
        ({"tracking": {"mlflow_uri": "databricks"}}, []),
    ],
)
def test_every_place_of_a_configuration_is_one_that_pods_have(tree: dict[str, object], keys: list[str]) -> None:
    assert out_of_reach(tree) == keys


def test_every_source_of_a_mixture_is_looked_at() -> None:
    places = ("/runs/a", "/home/me/b", "s3://mine/c")
    mixture = [{"source": place, "weight": 1} for place in places]
    assert out_of_reach({"data": {"mixture": mixture}}) == ["data.mixture.1.source"]


@pytest.mark.parametrize(
    ("tree", "keys"),
    [
        ({"tracking": {"mlflow_uri": "https://token@mlflow.example.com"}}, ["tracking.mlflow_uri"]),
        ({"tracking": {"mlflow_uri": "postgresql://me:secret@host/mlflow"}}, ["tracking.mlflow_uri"]),
        ({"checkpoint": {"url": "abfss://mine@account.example.com/commits"}}, []),
        ({"checkpoint": {"url": "hdfs://me@host/commits"}}, []),
        ({"task": {"path": "a:B", "params": {"hubs": ["https://token@h/m"]}}}, ["task.params.hubs.0"]),
        ({"task": {"path": "a:B", "params": {"greeting": "me@home, http://[not an address"}}}, []),
    ],
)
def test_no_credentials_get_into_a_config_map(tree: dict[str, object], keys: list[str]) -> None:
    assert out_of_reach(tree) == keys


def test_without_a_claim_commits_and_data_are_in_an_object_store() -> None:
    remote = {"data": {"train": "s3://mine/rows"}, "checkpoint": {"url": "s3://mine/commits"}}
    assert out_of_reach(remote, has_claim=False) == []
    assert out_of_reach({}, has_claim=False) == ["data.train", "--no-claim"]


@pytest.mark.parametrize(
    ("nodes", "sizes"),
    [
        ("1", {"NODES": "1", "MIN_MAX": "1:1", "MAX_FAILED": "0", "MIN_AVAILABLE": "0"}),
        ("4", {"NODES": "4", "MIN_MAX": "4:4", "MAX_FAILED": "0", "MIN_AVAILABLE": "1"}),
        ("2:8", {"NODES": "8", "MIN_MAX": "2:8", "MAX_FAILED": "1", "MIN_AVAILABLE": "1"}),
    ],
)
def test_sizes_follow_from_the_number_of_nodes(nodes: str, sizes: dict[str, str], config: str) -> None:
    """A job of one node can be drained, and one that needs all of its nodes fails with the first that fails."""
    loaded = sources.load(Path(config), environ={})
    params = KubernetesJob(loaded, "indexed-job", "a", nodes, "r/e:1", "4", "16Gi").params()
    assert {key: params[key] for key in sizes} == sizes


@pytest.mark.parametrize(
    ("gpus", "cpus", "memory", "threads", "expected"),
    [
        (None, None, None, 1, ("4", "16Gi", "1")),
        (8, None, None, 1, ("32", "128Gi", "1")),
        (2, None, None, 6, ("12", "32Gi", "6")),
        (8, "96", "1Ti", 1, ("96", "1Ti", "1")),
    ],
)
def test_what_a_node_has_follows_from_its_ranks(
    gpus: int | None, cpus: str | None, memory: str | None, threads: int, expected: tuple[str, str, str]
) -> None:
    """Eight ranks had the four CPUs and the memory of one."""
    config = Config.model_validate({"data": {"train": "/runs/rows"}, "threads_per_rank": threads})
    params = KubernetesJob(config, "indexed-job", "a", "1", "r/e:1", cpus, memory, gpus).params()
    assert (params["CPUS"], params["MEMORY"], params["THREADS"]) == expected


@pytest.mark.parametrize(
    ("cpus", "memory", "said_of_it"),
    [
        (None, "16", "--memory 16 is 16 bytes, too few: name the unit, such as 16Gi"),
        (None, "500m", "--memory '500m' is not an amount of memory"),
        (None, "16K", "--memory '16K' is not an amount of memory"),
        (None, "0", "--memory 0 is 0 bytes"),
        ("0", None, "--cpus '0' is not an amount of CPUs"),
        ("4Gi", None, "--cpus '4Gi' is not an amount of CPUs"),
        ("0.5", "1.5Gi", None),
        ("500m", "300M", None),
    ],
)
def test_amounts_are_such_as_a_node_can_have(cpus: str | None, memory: str | None, said_of_it: str | None) -> None:
    """16 bytes of memory, and a billion CPUs, were submitted."""
    config = Config.model_validate({"run": {"dir": "/runs/a"}, "data": {"train": "/runs/rows"}})
    found = list(KubernetesJob(config, "indexed-job", "a", "1", "r/e:1", cpus, memory).problems())
    assert [said_of_it in problem for problem in found if said_of_it] == [True] * bool(said_of_it)
    assert bool(found) == bool(said_of_it)


def test_the_environments_keys_are_in_what_pods_get(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were ignored without a word; what pods could not see is refused as in the file."""
    monkeypatch.setenv("ELASTIC_TRAIN__DATA__TRAIN", "/home/me/rows")
    code, _, errors = said(capsys, "k8s", config, "--nodes", "1", "--id", "a", "--image", "b", "--dry-run")
    assert (code, "data.train is /home/me/rows" in errors) == (2, True)


def test_a_job_of_the_same_name_is_named_when_kubernetes_refuses_another_configuration(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "kubectl"
    refusal = 'The ConfigMap "a" is invalid: data: Forbidden: field is immutable when `immutable` is set'
    program.write_text(f"#!/bin/sh\ntest $1 = kustomize && exit 0\ncat > /dev/null\necho '{refusal}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    code, _, errors = said(capsys, "k8s", config, "--nodes", "2", "--id", "a", "--image", "b")
    assert code == 1
    assert refusal in errors and "take another --id" in errors


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
    [("3", 180), ("3:30", 210), ("1:00:00", 3600), ("2-0", 172800), ("1-2:30", 95400), ("0-0:0:5", 5), ("x", None)]
    + [("0", math.inf), ("00:00:00", math.inf)]
    + [(word, math.inf) for word in ("UNLIMITED", "unlimited", "INFINITE")],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


def test_a_package_that_is_read_only_has_manifests_that_can_be_filled_in(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their copies were as read-only, which only root does not notice."""
    modes: list[int] = []

    def kubectl(*arguments: str) -> str:
        modes.extend(path.stat().st_mode for path in Path(arguments[1]).parent.rglob("*") if path.is_file())
        return ""

    shutil.copytree(kubernetes.MANIFESTS, tmp_path / "kubernetes")
    for path in tmp_path.rglob("kubernetes/**/*"):
        path.chmod(path.stat().st_mode & ~0o222)
    monkeypatch.setattr(kubernetes, "MANIFESTS", tmp_path / "kubernetes")
    monkeypatch.setattr(kubernetes, "_kubectl", kubectl)
    code, _, _ = said(capsys, "k8s", config, "--nodes", "2", "--id", "a", "--image", "a/b:c", "--dry-run")
    assert code == 0 and modes and all(mode & 0o200 for mode in modes)
