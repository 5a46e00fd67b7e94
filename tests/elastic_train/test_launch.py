"""The launcher: what it takes from flags, Kubernetes and Slurm, and the exit codes that a scheduler sees."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_train import cli
from elastic_train.errors import ConfigError
from elastic_train.launch import Flags, Launch, exit_code, first_host, resolve
from rendezvous import EtcdStore, TooFewNodesError, live_agent
from rendezvous.node import Node
from tests.conftest import ROOT, start
from tests.elastic_train.test_live import history, until_whole, write_config
from tests.processes import command_lines_below

pytestmark = pytest.mark.slow

SLURM = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "gpu[07-10]", "SLURM_NODEID": "2"}
KUBERNETES = {"PET_NNODES": "2:8", "PET_NPROC_PER_NODE": "4", "PET_RDZV_ENDPOINT": "etcd:2379", "PET_RDZV_ID": "k1"}


def resolved(flags: Flags, environ: dict[str, str], num_gpus: int = 0) -> Launch:
    return resolve(Path("c.yaml"), ["--epochs", "2"], flags, environ, num_gpus)


def test_alone_it_needs_nothing() -> None:
    """One node, a rank for each GPU, an etcd and a name of its own."""
    plan = resolved(Flags(), {}, num_gpus=8)
    assert (plan.min_nodes, plan.max_nodes, plan.ranks, plan.endpoint, plan.is_etcd_host) == (1, 1, 8, None, True)
    assert plan.arguments() == ["-m", "elastic_train", "c.yaml", "--epochs", "2"]
    assert resolved(Flags(), {}).ranks == 1


def test_kubernetes_variables_are_read_and_flags_win() -> None:
    """PET_* variables say what torchrun would take from them; the command line goes over them."""
    plan = resolved(Flags(ranks=2, run_id="mine"), KUBERNETES)
    assert (plan.min_nodes, plan.max_nodes, plan.ranks, plan.endpoint, plan.run_id) == (2, 8, 2, "etcd:2379", "mine")


def test_slurm_shares_the_first_nodes_etcd() -> None:
    """Without an endpoint the first host of the list has the job's etcd; only that node starts it."""
    plan = resolved(Flags(), SLURM)
    assert (plan.max_nodes, plan.run_id, plan.etcd_address, plan.is_etcd_host) == (4, "77", "gpu07", False)
    assert resolved(Flags(), {**SLURM, "SLURM_NODEID": "0"}).is_etcd_host


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [("a1", "a1"), ("a1,b[2-3]", "a1"), ("gpu[07-10,12]", "gpu07"), ("r1n[3,5]", "r1n3"), ("x[1-2],y4", "x1")],
)
def test_the_first_host_of_a_list(nodelist: str, first: str) -> None:
    """Slurm's short forms name the same host first as `scontrol show hostnames`."""
    assert first_host(nodelist) == first


def test_all_mistakes_are_told_at_once() -> None:
    """Nodes, recovery, endpoint and name: one error with everything that is wrong."""
    with pytest.raises(ConfigError) as told:
        resolved(Flags(nodes="0", recovery="life"), {"PET_NPROC_PER_NODE": "many"})
    assert len(told.value.problems) == 3
    with pytest.raises(ConfigError) as told:
        resolved(Flags(nodes="2"), {})
    assert [problem.split()[0] for problem in told.value.problems] == ["--endpoint", "--id"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (Flags(ranks=0), "--ranks must be at least 1, not 0"),
        (Flags(ranks=-1), "--ranks must be at least 1, not -1"),
        (Flags(ttl_s=math.inf), "--ttl-s must be a number of seconds"),
        (Flags(grace_s=math.nan), "--grace-s must be a number of seconds"),
        (Flags(grace_s=-1.0), "--grace-s must be a number of seconds"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(flags: Flags, told: str) -> None:
    """No count of ranks below 1 is taken for another, and no time that is none gets as far as etcd."""
    with pytest.raises(ConfigError, match=told):
        resolved(flags, {}, num_gpus=8)


def ended(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> tuple[int, str]:
    """Launch in this process something that gets no worker started; return the exit code and what was told."""
    (folder / "c.yaml").write_text("data: {train: nowhere}")
    with pytest.raises(SystemExit) as left:
        cli.main(["launch", str(folder / "c.yaml"), *flags])
    assert isinstance(left.value.code, int)
    return left.value.code, capsys.readouterr().err


@pytest.mark.parametrize("recovery", ["live", "restart"])
def test_a_control_plane_that_is_not_there_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, recovery: str
) -> None:
    """What is no endpoint ends with 2; one where nobody answers, and no etcd to start, with 1: a line, no traceback."""
    monkeypatch.setattr(live_agent, "START_PATIENCE_S", 0.2)
    monkeypatch.setitem(EtcdStore.__init__.__kwdefaults__, "give_up_after_s", 0.2)
    how = ("--recovery", recovery)
    code, told = ended(capsys, tmp_path, *how, "--endpoint", "a:b")
    assert (code, told) == (2, "error: etcd's endpoint 'a:b' is not HOST:PORT\n")
    code, told = ended(capsys, tmp_path, *how, "--endpoint", "127.0.0.1:1")
    assert code == 1 and told.startswith("error: no etcd answers at 127.0.0.1:1")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    code, told = ended(capsys, tmp_path, *how)
    assert code == 1 and told.startswith("error: no etcd found")


def test_too_few_nodes_end_with_77(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In restart mode it is the agent that waits in vain, and says so in TorchElastic's words."""

    def wait_in_vain(*_: object) -> None:
        raise TooFewNodesError("1 of 2 nodes came")

    monkeypatch.setattr(Node, "next_world", wait_in_vain)
    code, told = ended(capsys, tmp_path, "--recovery", "restart")
    assert (code, told.splitlines()[-1]) == (77, "error: 1 of 2 nodes came")


@pytest.mark.parametrize(
    ("codes", "has_failed", "expected"),
    [
        ([0, 0], False, 0),
        ([75, 0], False, 75),
        ([75, 75], True, 75),
        ([75, -9], True, 1),
        ([1, 65, -15], True, 65),
        ([2, 65], True, 65),
        ([77, 75], True, 77),
        ([0, 74], True, 74),
        ([], True, 1),
        ([0, 1], True, 1),
    ],
)
def test_codes_that_say_more_win(codes: list[int], has_failed: bool, expected: int) -> None:
    """Damage, a bad configuration, a hang, too few nodes, a lost result are passed on; the rest is 0, 75 or 1."""
    assert exit_code(codes, has_failed=has_failed) == expected


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([-15], 75), ([75, -15], 75), ([0, -15], 75), ([], 75), ([-9], 1), ([65, -15], 65), ([0], 0)],
)
def test_who_is_told_before_its_workers_listen_has_lost_nothing(codes: list[int], expected: int) -> None:
    """A worker that SIGTERM itself ends was still importing; told at any other time it leaves by a code of its own."""
    assert exit_code(codes, has_failed=False, is_told=True) == expected


def command(config: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "elastic_train.cli", "launch", config, *flags]


def test_sigterm_ends_with_75_and_the_same_line_goes_on(tmp_path: Path, rows: Path) -> None:
    """Told to leave, the launcher ends with 75, committed; started again, with 0, from where it was."""
    config = write_config(tmp_path, rows, 300)
    job = subprocess.Popen(command(config, "--ranks", "2"), cwd=ROOT)
    until_whole(tmp_path / "run", 2)
    job.send_signal(signal.SIGTERM)
    assert job.wait(240) == 75
    assert subprocess.run(command(config, "--ranks", "1"), cwd=ROOT, timeout=240, check=False).returncode == 0
    restores = [line for line in history(tmp_path / "run") if line["op"] == "restore"]
    assert max(line["step"] for line in restores) > 0


def test_sigterm_before_a_worker_listens_ends_with_75(tmp_path: Path, rows: Path) -> None:
    """A scheduler that takes a node back right after the start starts it again, and does not call it failed."""
    config = write_config(tmp_path, rows, 300)
    job = subprocess.Popen(command(config, "--ranks", "1"), cwd=ROOT)
    while not any("-m elastic_train " in line for line in command_lines_below(job.pid)):
        assert job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 75


def test_a_done_job_without_its_result_ends_with_74_and_is_not_started_over(tmp_path: Path, rows: Path) -> None:
    """Nobody takes the place of the rank that could not write it; another start writes it, and trains nothing."""
    config = write_config(tmp_path, rows, 20, lane_ms=0.0)
    (tmp_path / "run" / "result.json").mkdir(parents=True)
    done = subprocess.run(
        command(config, "--ranks", "2"), cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 74, done.stderr
    assert (
        f"error: step 20 is committed, but the result could not be written: {tmp_path}/run/result.json" in done.stderr
    )
    assert "another is started in its place" not in done.stderr
    assert sorted(line["rank"] for line in history(tmp_path / "run") if line["op"] == "form") == [0, 1]
    (tmp_path / "run" / "result.json").rmdir()
    assert start([config]).code == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["step"] == 20
    assert len([line for line in history(tmp_path / "run") if line["op"] == "step"]) == 2 * 20


def test_a_bad_configuration_is_told_once(tmp_path: Path, rows: Path) -> None:
    """An unknown key ends the launcher with 2 before any worker starts."""
    done = subprocess.run(
        command(write_config(tmp_path, rows, 9), "--ranks", "2", "--batch.micro_bach", "3"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("unknown key") == 1
    assert not (tmp_path / "run").exists()
