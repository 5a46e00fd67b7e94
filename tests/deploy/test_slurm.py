"""Jobs on a real Slurm: the scripts of deploy/slurm, and what the launcher makes of Slurm's variables and signals."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from chaos.services.slurm.cluster import SlurmCluster
from chaos.services.slurm.machines import eventually
from elastic_train.cli.places.submit.slurm import SlurmJob, render
from rendezvous.etcd.server import find_binary
from tests.conftest import ROOT
from tests.elastic_train.training.live.test_live import JOB, history, write_config

pytestmark = pytest.mark.deploy
SCRIPTS = ROOT / "deploy" / "slurm"
PATIENCE_S = 300.0
"""For a world to form; three nodes have their imports to do first."""
COMMIT_EVERY = int(str(dict(JOB["checkpoint"])["every_steps"]))  # type: ignore[call-overload]


@pytest.fixture
def path(launcher: str) -> dict[str, str]:
    """The environment in which jobs find the launcher and an etcd."""
    return {"PATH": f"{Path(launcher).parent}:/usr/sbin:/usr/bin:/sbin:/bin"}


def worlds(run: Path) -> list[int]:
    """Return the sizes of the worlds in which steps were taken, by term."""
    sizes = {line["term"]: line["world"] for line in history(run) if line["op"] == "form"}
    stepped = {line["term"] for line in history(run) if line["op"] == "step"}
    return [sizes[term] for term in sorted(sizes) if term in stepped]


def until_world(run: Path, size: int) -> None:
    """Wait until a world of that size, the newest of all, has taken some steps."""

    def trains() -> bool:
        if not (run / "history").is_dir() or worlds(run)[-1:] != [size]:
            return False
        lines = history(run)
        newest = max(line["term"] for line in lines if line["op"] == "form")
        return sum(line["op"] == "step" and line["term"] == newest for line in lines) > 3 * size

    eventually(trains, f"{size} ranks train in {run}", PATIENCE_S)


def steps_done_twice(run: Path) -> list[int]:
    """Return the steps that were applied in more than one term: those that a fault has cost."""
    applied = {(line["step"], line["term"]) for line in history(run) if line["op"] == "step"}
    return [step for step, times in Counter(step for step, _ in applied).items() if times > 1]


def test_a_job_survives_its_nodes_and_leaves_when_it_has_to(
    slurm: SlurmCluster, tmp_path: Path, rows: Path, path: dict[str, str]
) -> None:
    """train.sbatch: a node without power, an urgent job that takes all nodes, a requeue by hand: no step is lost."""
    done = tmp_path / "done"
    config, run = write_config(tmp_path, rows, 200, lane_ms=250.0, until=done), tmp_path / "run"
    job = slurm.submit(
        "--nodes=3", "-D", str(tmp_path), "-o", str(tmp_path / "log"), str(SCRIPTS / "train.sbatch"), config, **path
    )
    until_world(run, 3)
    slurm.machines.power_off("n3")
    until_world(run, 2)
    slurm.boot("n3")

    urgent = slurm.submit("-p", "urgent", "--nodes=3", "-o", "/dev/null", "--wrap", "sleep 1000")
    slurm.await_state(urgent, "RUNNING", timeout_s=PATIENCE_S)
    assert slurm.state(job) == "PENDING", (tmp_path / "log").read_text()
    slurm.run("scancel", urgent)
    until_world(run, 3)

    slurm.run("scontrol", "requeue", job)
    slurm.await_state(job, "PENDING", timeout_s=PATIENCE_S)
    until_world(run, 3)

    done.touch()
    slurm.await_state(job, "COMPLETED", timeout_s=PATIENCE_S)
    assert json.loads((run / "result.json").read_text())["step"] == 200
    assert steps_done_twice(run) == []
    assert not list(tmp_path.glob(".codes-*"))


def test_the_first_node_takes_the_jobs_etcd_along_and_costs_what_is_not_committed(
    slurm: SlurmCluster, tmp_path: Path, rows: Path, path: dict[str, str]
) -> None:
    """Its batch script runs there, so nobody requeues the job; once somebody does, it goes on from the last commit."""
    done = tmp_path / "done"
    config, run = write_config(tmp_path, rows, 200, lane_ms=250.0, until=done), tmp_path / "run"
    job = slurm.submit(
        "--nodes=2", "-D", str(tmp_path), "-o", str(tmp_path / "log"), str(SCRIPTS / "train.sbatch"), config, **path
    )
    until_world(run, 2)
    eventually(lambda: any((run / "commits").glob("[0-9]*")), "a commit", PATIENCE_S)
    slurm.machines.power_off("n1")
    eventually(lambda: slurm.job(job)["NumNodes"] == "1", "Slurm takes the node from the job", PATIENCE_S)
    assert slurm.state(job) == "RUNNING"
    before = len(worlds(run))
    slurm.run("scontrol", "requeue", job)
    eventually(lambda: len(worlds(run)) > before, "it trains again", PATIENCE_S)
    until_world(run, 2)
    done.touch()
    slurm.await_state(job, "COMPLETED", timeout_s=PATIENCE_S)
    assert json.loads((run / "result.json").read_text())["step"] == 200
    assert len(steps_done_twice(run)) <= COMMIT_EVERY


def test_what_submit_renders_leaves_before_its_time_limit_and_goes_on(
    slurm: SlurmCluster, tmp_path: Path, rows: Path, path: dict[str, str]
) -> None:
    """Two minutes before its end it is asked to leave (75), and is requeued: no step is lost, and it is COMPLETED."""
    done = tmp_path / "done"
    config, run = write_config(tmp_path, rows, 200, lane_ms=250.0, until=done), tmp_path / "run"
    script = tmp_path / "job.sbatch"
    script.write_text(render(SlurmJob(Path(config), ("--batch.micro-batch", "8"), "2", time="3")))
    job = slurm.submit("-D", str(tmp_path), "-o", str(tmp_path / "log"), str(script), **path)
    slurm.await_state(job, "RUNNING", timeout_s=PATIENCE_S)
    eventually(lambda: slurm.job(job)["Restarts"] == "1", "it is requeued before its time is over", PATIENCE_S)
    done.touch()
    slurm.await_state(job, "COMPLETED", timeout_s=PATIENCE_S)
    assert json.loads((run / "result.json").read_text())["step"] == 200
    assert steps_done_twice(run) == []


def test_a_step_on_some_nodes_of_a_job_meets_on_the_first_of_them(
    slurm: SlurmCluster, tmp_path: Path, rows: Path, launcher: str, path: dict[str, str]
) -> None:
    """It looked for an etcd on the job's first node, on which it did not run; and two launchers a node are refused."""
    config = write_config(tmp_path, rows, 5, lane_ms=0.0)
    script = tmp_path / "job"
    script.write_text(
        f"#!/bin/sh\nsrun -N2 -w n2,n3 --ntasks-per-node=1 {launcher} launch {config} --nodes 2\necho code $?\n"
        f"srun -N2 --ntasks=4 --ntasks-per-node=2 --overcommit {launcher} launch {config}\necho code $?\n"
    )
    job = slurm.submit("--nodes=3", "-o", str(tmp_path / "log"), str(script), **path)
    slurm.await_state(job, "COMPLETED", timeout_s=PATIENCE_S)
    log = (tmp_path / "log").read_text()
    assert [line for line in log.splitlines() if line.startswith("code")] == ["code 0", "code 2"], log
    assert worlds(tmp_path / "run") == [2]
    assert "SLURM_STEP_TASKS_PER_NODE=2(x2) starts several launchers on a node" in log


def test_an_array_loses_no_step_and_grows_by_another_one(
    slurm: SlurmCluster, tmp_path: Path, rows: Path, path: dict[str, str]
) -> None:
    """elastic-array.sbatch on an etcd of etcd.sbatch: a lost node is requeued and joins again, a second array joins."""
    done, endpoints = tmp_path / "done", tmp_path / "etcd.endpoints"
    config, run = write_config(tmp_path, rows, 200, lane_ms=250.0, until=done), tmp_path / "run"
    etcd = {"ENDPOINTS": str(endpoints), "DATA": str(tmp_path / "etcd"), **path}
    slurm.submit("-w", "n1", "-o", str(tmp_path / "etcd.log"), str(SCRIPTS / "etcd.sbatch"), **etcd)
    eventually(endpoints.exists, "etcd is there", PATIENCE_S)
    shared = {"RUN": tmp_path.name, "ETCD": endpoints.read_text().strip(), **path}

    def submit(*more: str) -> str:
        out = ("-D", str(tmp_path), "-o", str(tmp_path / "log-%A_%a"))
        return slurm.submit(*out, *more, str(SCRIPTS / "elastic-array.sbatch"), config, **shared)

    first = submit("--array=0-0", "-w", "n2")
    until_world(run, 1)
    second = submit("--array=0-0", "-w", "n3")
    until_world(run, 2)
    slurm.machines.power_off("n3")
    until_world(run, 1)
    slurm.boot("n3")
    until_world(run, 2)
    done.touch()
    for job in (first, second):
        slurm.await_state(f"{job}_0", "COMPLETED", timeout_s=PATIENCE_S)
    assert steps_done_twice(run) == []


def test_of_two_jobs_in_one_folder_the_second_ends_with_2_within_a_minute(
    slurm: SlurmCluster, tmp_path: Path, rows: Path, launcher: str, path: dict[str, str]
) -> None:
    """They fenced each other off in turn, for three times the work, and all ended with 0."""
    config = write_config(tmp_path, rows, 100_000)
    one_node = ("--nodes=1", "--exclusive", "-D", str(tmp_path))
    wrapped = ("--wrap", f"srun {launcher} launch {config}")
    slurm.submit(*one_node, "-o", str(tmp_path / "log1"), *wrapped, **path)
    until_world(tmp_path / "run", 1)
    began = time.monotonic()
    second = slurm.submit(*one_node, "-o", str(tmp_path / "log2"), *wrapped, **path)
    slurm.await_state(second, "FAILED", timeout_s=PATIENCE_S)
    assert slurm.job(second)["ExitCode"] == "2:0", (tmp_path / "log2").read_text()
    assert "is at work here" in (tmp_path / "log2").read_text()
    assert time.monotonic() - began < PATIENCE_S
    assert worlds(tmp_path / "run") == [1]


def test_a_job_is_held_let_go_and_cancelled_and_a_draining_node_is_left_in_peace(
    slurm: SlurmCluster, tmp_path: Path, rows: Path, launcher: str, path: dict[str, str]
) -> None:
    """Drain ends nothing; requeuehold commits and waits; a cancelled job is not requeued by its own script."""
    config, run = write_config(tmp_path, rows, 100_000), tmp_path / "run"
    out = ("-D", str(tmp_path), "-o", str(tmp_path / "log"))
    job = slurm.submit("--nodes=2", *out, str(SCRIPTS / "train.sbatch"), config, **path)
    until_world(run, 2)
    slurm.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    until_steps = len(history(run))
    eventually(lambda: len(history(run)) > until_steps + 10, "it goes on", PATIENCE_S)
    assert slurm.state(job) == "RUNNING"
    slurm.run("scontrol", "update", "nodename=n2", "state=resume")

    slurm.run("scontrol", "requeuehold", job)
    slurm.await_state(job, "PENDING", timeout_s=PATIENCE_S)
    assert "held" in slurm.job(job)["Reason"].lower(), slurm.job(job)
    slurm.run("scontrol", "release", job)
    slurm.await_state(job, "RUNNING", timeout_s=PATIENCE_S)
    before = len(worlds(run))
    eventually(lambda: len(worlds(run)) > before, "it trains again", PATIENCE_S)
    assert steps_done_twice(run) == []

    slurm.run("scancel", job)
    slurm.await_state(job, "CANCELLED", timeout_s=PATIENCE_S)
    eventually(lambda: not slurm.run("squeue", "-h").strip(), "nothing of it is left", PATIENCE_S)
    assert slurm.state(job) == "CANCELLED"
    assert steps_done_twice(run) == []


def test_doctors_of_all_nodes_meet(
    slurm: SlurmCluster, tmp_path: Path, rows: Path, launcher: str, path: dict[str, str]
) -> None:
    """As one step of a job, over an etcd on one of its nodes: addresses, clocks and the folder that they share."""
    config = write_config(tmp_path, rows, 5)
    etcd = f"{Path(launcher).parent}/etcd --data-dir {tmp_path}/etcd --listen-client-urls http://0.0.0.0:2379"
    script = tmp_path / "job"
    doctor = f"{launcher} doctor {config} --etcd n1:2379 --id doctor --peers 2 --wait-s 200 --json"
    script.write_text(
        f"#!/bin/sh\n{etcd} --advertise-client-urls http://n1:2379 2>/dev/null &\n"
        f"srun --ntasks-per-node=1 --output={tmp_path}/said-%n {doctor}\n"
    )
    job = slurm.submit("--nodes=3", "-o", str(tmp_path / "log"), str(script), **path)
    slurm.await_state(job, "COMPLETED", timeout_s=PATIENCE_S)
    for number in range(3):
        findings = json.loads((tmp_path / f"said-{number}").read_text())["findings"]
        levels = {
            check: [f["level"] for f in findings if f["check"] == check] for check in ("peers", "connection", "clock")
        }
        assert levels == {"peers": ["ok"], "connection": ["ok"] * 4, "clock": ["ok"] * 3}, findings
        assert sum("sees the same" in f["found"] for f in findings) == 2


def test_a_late_first_node_is_waited_for(
    slurm: SlurmCluster, tmp_path: Path, rows: Path, launcher: str, path: dict[str, str]
) -> None:
    """It starts the job's etcd 40 s after the others came: they used to end after 15 s, and it trained alone."""
    config = write_config(tmp_path, rows, 5, lane_ms=0.0)
    script, node = tmp_path / "job", tmp_path / "node"
    node.write_text(
        "#!/bin/sh\n[ $SLURM_PROCID -ne 0 ] || sleep 40\n"
        f"exec {launcher} launch {config} --nodes 3 --hang-timeout-s 60\n"
    )
    node.chmod(0o755)
    script.write_text(f"#!/bin/sh\nsrun --ntasks-per-node=1 {node}\necho code $?\n")
    job = slurm.submit("--nodes=3", "-o", str(tmp_path / "log"), str(script), **path)
    slurm.await_state(job, "COMPLETED", timeout_s=PATIENCE_S)
    log = (tmp_path / "log").read_text()
    assert "code 0" in log.splitlines(), log
    assert log.count("waiting for the first node, which starts the job's etcd") >= 2, log
    assert worlds(tmp_path / "run") == [3]


def test_an_etcd_of_three_nodes_survives_one_of_them(slurm: SlurmCluster, tmp_path: Path, path: dict[str, str]) -> None:
    """etcd.sbatch: what was written before a node lost its power is there, and more can be written."""
    control, endpoints = Path(find_binary()).with_name("etcdctl"), tmp_path / "etcd.endpoints"
    if not control.exists():
        pytest.skip(f"no {control} here: install it (Debian: etcd-client)")
    etcd = {"ENDPOINTS": str(endpoints), "DATA": str(tmp_path / "etcd"), **path}
    slurm.submit("--nodes=3", "-o", str(tmp_path / "etcd.log"), str(SCRIPTS / "etcd.sbatch"), **etcd)
    eventually(endpoints.exists, "etcd is there", PATIENCE_S)
    where = endpoints.read_text().strip()
    assert where == "n1:2379,n2:2379,n3:2379"

    def ask(*words: str) -> str:
        command = ["env", "ETCDCTL_API=3", str(control), f"--endpoints={where}", *words]
        done = subprocess.run(
            slurm.machines["n2"].inside(*command), capture_output=True, text=True, check=False, timeout=60
        )
        return done.stdout.strip() if done.returncode == 0 else done.stderr

    eventually(lambda: ask("put", "before", "1") == "OK", "a majority answers", PATIENCE_S)
    slurm.machines.power_off("n3")
    eventually(lambda: ask("put", "after", "2") == "OK", "two of three answer", PATIENCE_S)
    assert ask("get", "before", "--print-value-only") == "1"
    assert "unhealthy" in ask("endpoint", "health")
