"""Jobs on a real Slurm: the scripts of deploy/slurm, and what the launcher makes of Slurm's variables and signals."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.services.slurm.cluster import SlurmCluster
from chaos.services.slurm.machines import eventually
from elastic_train.cli.places.submit.slurm import LEAVE_S, SlurmJob, render
from elastic_train.launch.options import Flags
from tests.deploy.jobs import (
    LANE_MS,
    PATIENCE_S,
    STEPS,
    steps_done_twice,
    submit_train,
    until_world,
    worlds,
    write_patient_config,
)
from tests.elastic_train.training.live.test_live import history

pytestmark = [pytest.mark.deploy, pytest.mark.xdist_group("slurm")]


def test_what_submit_renders_leaves_before_its_time_limit_and_goes_on(
    slurm: SlurmCluster, tmp_path: Path, rows: Path, path: dict[str, str]
) -> None:
    """Two minutes before its end it is asked to leave (75), and is requeued: no step is lost, and it is COMPLETED."""
    done = tmp_path / "done"
    config, run = write_patient_config(tmp_path, rows, STEPS, LANE_MS, done), tmp_path / "run"
    script = tmp_path / "job.sbatch"
    comment = r"""what's "a b" \c # here"""
    flags, options = Flags(nodes="2", grace_s=100.0), (f"--comment={comment}",)
    script.write_text(render(SlurmJob(Path(config), ("--batch.micro-batch", "8"), flags, time="50", options=options)))
    job = slurm.submit("-D", str(tmp_path), "-o", str(tmp_path / "log"), str(script), **path)
    assert f"Comment={comment} " in slurm.run("scontrol", "-o", "show", "job", job)
    term = until_world(run, 2)
    hours, minutes, _ = (int(part) for part in slurm.job(job)["RunTime"].split(":"))
    slurm.run("scontrol", "update", f"jobid={job}", f"timelimit={60 * hours + minutes + LEAVE_S // 60 + 1}")
    eventually(lambda: slurm.job(job)["Restarts"] == "1", "it is requeued before its time is over", PATIENCE_S)
    assert steps_done_twice(run) == []
    slurm.await_state(job, "PENDING", "RUNNING")
    slurm.run("scontrol", "update", f"jobid={job}", "timelimit=50")  # on a busy machine, a start may take its minutes
    until_world(run, 2, above=term)
    done.touch()
    slurm.await_state(job, "COMPLETED", timeout_s=PATIENCE_S)
    assert json.loads((run / "result.json").read_text())["step"] == STEPS
    assert steps_done_twice(run) == []


def test_a_step_on_some_nodes_of_a_job_meets_on_the_first_of_them(
    slurm: SlurmCluster, tmp_path: Path, rows: Path, launcher: str, path: dict[str, str]
) -> None:
    """It looked for an etcd on the job's first node, on which it did not run; and two launchers a node are refused."""
    config = write_patient_config(tmp_path, rows, 5, lane_ms=0.0)
    script = tmp_path / "job"
    script.write_text(
        f"#!/bin/sh\nsrun -N2 -w n2,n3 --ntasks-per-node=1 {launcher} launch {config} --nodes 2\necho code $?\n"
        f"srun -N2 --ntasks=4 --ntasks-per-node=2 --overcommit {launcher} launch {config}\necho code $?\n"
    )
    job = slurm.submit("--nodes=3", "-o", str(tmp_path / "log"), str(script), **path)
    slurm.await_state(job, "COMPLETED", timeout_s=PATIENCE_S)
    log = (tmp_path / "log").read_text()
    assert [line for line in log.splitlines() if line.startswith("code")] == ["code 0", "code 2"], log
    assert set(worlds(tmp_path / "run")) == {2}
    assert "SLURM_STEP_TASKS_PER_NODE=2(x2) starts several launchers on a node" in log


def test_all_nodes_of_a_step_leave_with_75(
    slurm: SlurmCluster,
    tmp_path: Path,
    rows: Path,
    launcher: str,
    path: dict[str, str],
    record_property: Callable[[str, object], None],
) -> None:
    """The step's signal reaches all launchers at once, and the one that has the job's etcd, too: it goes last."""
    config, run = write_patient_config(tmp_path, rows, 100_000), tmp_path / "run"
    script, node, ends = tmp_path / "job", tmp_path / "node", tmp_path / "ends"
    ends.mkdir()
    node.write_text(
        f"#!/bin/sh\ntrap : TERM\n{launcher} launch {config} --nodes 3 --grace-s 100 & launched=$!\n"
        f"wait $launched; wait $launched; code=$?\necho $code $(date +%s.%N) > {ends}/$SLURM_PROCID.tmp\n"
        f"mv {ends}/$SLURM_PROCID.tmp {ends}/$SLURM_PROCID\n"
    )
    node.chmod(0o755)
    script.write_text(f"#!/bin/sh\nsrun --ntasks-per-node=1 {node}\n")
    job = slurm.submit("--nodes=3", "-o", str(tmp_path / "log"), str(script), **path)
    until_world(run, 3)
    asked_at_s = time.time()
    slurm.run("scancel", "--signal=TERM", f"{job}.0")
    eventually(lambda: len(list(ends.glob("[0-2]"))) == 3, "all nodes have left", PATIENCE_S)
    left = [(tmp_path / "ends" / str(number)).read_text().split() for number in range(3)]
    assert [code for code, _ in left] == ["75"] * 3, (tmp_path / "log").read_text()
    took_s = max(float(at_s) for _, at_s in left) - asked_at_s
    record_property("Slurm: seconds from a step's signal until all nodes have left with 75", took_s)
    applied = max(line["step"] for line in history(run) if line["op"] == "step")
    assert max(line["step"] for line in history(run) if line["op"] == "commit") == applied


def test_of_two_jobs_in_one_folder_the_second_ends_with_2_within_a_minute(
    slurm: SlurmCluster, tmp_path: Path, rows: Path, launcher: str, path: dict[str, str]
) -> None:
    """They fenced each other off in turn, for three times the work, and all ended with 0."""
    config = write_patient_config(tmp_path, rows, 100_000)
    one_node = ("--nodes=1", "--exclusive", "-D", str(tmp_path))
    wrapped = ("--wrap", f"srun {launcher} launch {config}")
    slurm.submit(*one_node, "-o", str(tmp_path / "log1"), *wrapped, **path)
    until_world(tmp_path / "run", 1)
    second = slurm.submit(*one_node, "-o", str(tmp_path / "log2"), *wrapped, **path)
    slurm.await_state(second, "FAILED", timeout_s=PATIENCE_S)
    assert slurm.job(second)["ExitCode"] == "2:0", (tmp_path / "log2").read_text()
    assert "is at work here" in (tmp_path / "log2").read_text()
    assert set(worlds(tmp_path / "run")) == {1}


def test_a_cancelled_job_is_not_requeued_by_its_own_script(
    slurm: SlurmCluster, tmp_path: Path, rows: Path, path: dict[str, str]
) -> None:
    """It commits, and stays cancelled."""
    config, run = write_patient_config(tmp_path, rows, 100_000), tmp_path / "run"
    job = submit_train(slurm, tmp_path, config, path, "--nodes=2")
    until_world(run, 2)
    slurm.run("scancel", job)
    slurm.await_state(job, "CANCELLED", timeout_s=PATIENCE_S)
    eventually(lambda: not slurm.run("squeue", "-h").strip(), "nothing of it is left", PATIENCE_S)
    assert slurm.state(job) == "CANCELLED"
    assert steps_done_twice(run) == []
    applied = max(line["step"] for line in history(run) if line["op"] == "step")
    assert max(line["step"] for line in history(run) if line["op"] == "commit") == applied


def test_doctors_of_all_nodes_meet(
    slurm: SlurmCluster,
    tmp_path: Path,
    rows: Path,
    launcher: str,
    path: dict[str, str],
    record_property: Callable[[str, object], None],
) -> None:
    """As one step of a job, over an etcd on one of its nodes: addresses, clocks and the folder that they share."""
    config = write_patient_config(tmp_path, rows, 5)
    etcd = f"{Path(launcher).parent}/etcd --data-dir {tmp_path}/etcd --listen-client-urls http://0.0.0.0:2379"
    script = tmp_path / "job"
    doctor = f"{launcher} doctor {config} --etcd n1:2379 --id doctor --peers 2 --wait-s 400 --json"
    script.write_text(
        f"#!/bin/sh\n{etcd} --advertise-client-urls http://n1:2379 2>/dev/null &\n"
        f"began=$(date +%s.%N); srun --ntasks-per-node=1 --output={tmp_path}/said-%n {doctor} || exit\n"
        f"echo $began $(date +%s.%N) >{tmp_path}/times\n"
    )
    job = slurm.submit("--nodes=3", "-o", str(tmp_path / "log"), str(script), **path)
    slurm.await_state(job, "COMPLETED", timeout_s=PATIENCE_S)
    began_s, ended_s = map(float, (tmp_path / "times").read_text().split())
    record_property("Slurm: seconds that the doctors of three nodes took", ended_s - began_s)
    for number in range(3):
        findings = json.loads((tmp_path / f"said-{number}").read_text())["findings"]
        levels = {
            check: [f["level"] for f in findings if f["check"] == check] for check in ("peers", "connection", "clock")
        }
        assert levels == {"peers": ["ok"], "connection": ["ok"] * 4, "clock": ["ok"] * 3}, findings
        assert sum("sees the same" in f["found"] for f in findings) == 2
