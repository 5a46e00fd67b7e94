"""Where a job's etcd is on a real Slurm: on its first node, late or lost; in a job of its own, on one node or three."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.services.slurm.cluster import SlurmCluster, folder_of_a_cluster, why_no_slurm
from chaos.services.slurm.machines import eventually
from rendezvous.etcd.server import find_binary
from tests.conftest import ROOT
from tests.deploy.jobs import (
    LANE_MS,
    PATIENCE_S,
    SCRIPTS,
    STEPS,
    first_step_s,
    newest_term,
    steps_done_twice,
    submit_train,
    until_world,
    worlds,
    write_patient_config,
)
from tests.deploy.pages import command
from tests.elastic_train.training.live.test_live import history

pytestmark = [pytest.mark.deploy, pytest.mark.xdist_group("slurm-etcd")]
LOOK_S = "10"
"""Seconds between a job's checks for its first node; the default is half a minute."""


def start_etcd(slurm: SlurmCluster, folder: Path, path: dict[str, str], *on: str) -> str:
    """Submit etcd.sbatch as its page does, or `on` fewer nodes; return its endpoints once it answers."""
    endpoints = folder / "etcd.endpoints"
    filled = {
        "$PWD/etcd.endpoints": str(endpoints),
        "$PWD/etcd": str(folder / "etcd"),
        "etcd.sbatch": str(SCRIPTS / "etcd.sbatch"),
    }
    variables, (_, nodes, *script) = command("slurm.md", "ENDPOINTS=", filled)
    slurm.submit(*(on or [nodes]), "-o", str(folder / "etcd.log"), *script, **variables, **path)
    eventually(lambda: endpoints.exists() and endpoints.read_text().strip(), "etcd is there", PATIENCE_S)
    return endpoints.read_text().strip()


def test_the_first_node_takes_the_jobs_etcd_along_and_the_others_requeue_the_job(
    slurm: SlurmCluster,
    tmp_path: Path,
    rows: Path,
    path: dict[str, str],
    record_property: Callable[[str, object], None],
) -> None:
    """Its batch script ran there: the other node finds that it is lost, and all begins again at the last commit."""
    done = tmp_path / "done"
    config, run = write_patient_config(tmp_path, rows, STEPS, LANE_MS, done), tmp_path / "run"
    job = submit_train(slurm, tmp_path, config, {**path, "LOOK_S": LOOK_S}, "--nodes=2", grace_s=10)
    term = until_world(run, 2)
    eventually(lambda: any(line["op"] == "commit" for line in history(run)), "a commit", PATIENCE_S)
    committed = max(line["step"] for line in history(run) if line["op"] == "commit")
    lost_at_s = time.time()
    slurm.machines.power_off("n1")
    term = until_world(run, 2, above=term)
    record_property(
        "Slurm: seconds from the first node's power loss to the next step", first_step_s(run, term) - lost_at_s
    )
    record_property("Slurm: steps lost with the first node and its etcd", len(steps_done_twice(run)))
    assert slurm.job(job)["Restarts"] == "1"
    begun_at = {line["step"] for line in history(run) if line["op"] == "restore" and line["term"] == term}
    assert min(begun_at) >= committed
    done.touch()
    slurm.await_state(job, "COMPLETED", timeout_s=PATIENCE_S)
    assert json.loads((run / "result.json").read_text())["step"] == STEPS


def test_a_job_beside_an_etcd_of_three_loses_no_step_with_the_first_node_of_both(
    slurm: SlurmCluster, tmp_path: Path, rows: Path, path: dict[str, str]
) -> None:
    """Both batch scripts ran there. Two members are a majority; once it is back, the job is requeued onto all nodes."""
    done = tmp_path / "done"
    config, run = write_patient_config(tmp_path, rows, STEPS, LANE_MS, done), tmp_path / "run"
    where = start_etcd(slurm, tmp_path, path)
    assert where == "n1:2379,n2:2379,n3:2379"
    variables = {**path, "ETCD": where, "LOOK_S": LOOK_S}
    job = submit_train(slurm, tmp_path, config, variables, "--nodes=2", "-w", "n1,n2", "--oversubscribe")
    term = until_world(run, 2)
    slurm.machines.power_off("n1")
    term = until_world(run, 1, above=term)
    eventually(lambda: slurm.job(job)["NumNodes"] == "1" or slurm.state(job) == "PENDING", "Slurm notices", PATIENCE_S)
    slurm.boot("n1")
    until_world(run, 2, above=term)
    assert slurm.job(job)["Restarts"] == "1"
    assert steps_done_twice(run) == []
    done.touch()
    slurm.await_state(job, "COMPLETED", timeout_s=PATIENCE_S)
    assert json.loads((run / "result.json").read_text())["step"] == STEPS
    assert steps_done_twice(run) == []


@pytest.mark.xdist_group("slurm-etcd-moves")
def test_a_job_goes_on_while_its_etcd_moves_to_other_nodes(
    tmp_path: Path, rows: Path, path: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An etcd of three members is requeued, two of its nodes are those before: another one begins, and the job finds
    it by its file, commits there, and forms its next world; no step is lost. Members that were to meet again did not.
    """
    if why := why_no_slurm():
        pytest.skip(why)
    done, endpoints = tmp_path / "done", tmp_path / "etcd.endpoints"
    config, run = write_patient_config(tmp_path, rows, STEPS, LANE_MS, done), tmp_path / "run"
    shared = [tmp_path_factory.getbasetemp(), ROOT, Path(sys.prefix)]

    def committed() -> int:
        return max((line["step"] for line in history(run) if line["op"] == "commit"), default=0)

    with folder_of_a_cluster() as folder, SlurmCluster(folder, 4, shared=shared) as slurm:
        assert start_etcd(slurm, tmp_path, path) == "n1:2379,n2:2379,n3:2379"
        etcd = slurm.run("squeue", "-h", "-o", "%i").strip()
        variables = {**path, "ETCD": f"@{endpoints}"}
        job = submit_train(slurm, tmp_path, config, variables, "--nodes=2", "-w", "n3,n4", "--oversubscribe")
        until_world(run, 2)
        slurm.run("scontrol", "update", "nodename=n1", "state=drain", "reason=test")
        slurm.run("scontrol", "requeue", etcd)
        moved = "n2:2379,n3:2379,n4:2379"
        eventually(lambda: endpoints.read_text().strip() == moved, "etcd is elsewhere", PATIENCE_S)
        before = committed()
        eventually(lambda: committed() > before, "a commit, which its etcd has to allow", PATIENCE_S)
        term = newest_term(run)
        formed = [line for line in history(run) if line["op"] == "form" and line["term"] == term]
        leader = next(line for line in formed if line["rank"] == 0)
        pid = slurm.machines[str(leader["host"])].process(leader["pid"])
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until_world(run, 2, above=term)
        done.touch()
        slurm.await_state(job, "COMPLETED", timeout_s=PATIENCE_S)
    assert json.loads((run / "result.json").read_text())["step"] == STEPS
    assert steps_done_twice(run) == []


def test_an_array_trains_on_without_a_node_that_lost_its_power(
    slurm: SlurmCluster,
    tmp_path: Path,
    rows: Path,
    path: dict[str, str],
    record_property: Callable[[str, object], None],
) -> None:
    """elastic-array.sbatch on an etcd of etcd.sbatch. (That the node's job joins again is a scenario's.)"""
    done = tmp_path / "done"
    config, run = write_patient_config(tmp_path, rows, 200, lane_ms=250.0, until=done), tmp_path / "run"
    start_etcd(slurm, tmp_path, path, "-w", "n1")
    filled = {
        "@$PWD/etcd.endpoints": f"@{tmp_path}/etcd.endpoints",
        "quality-1": tmp_path.name,
        "--array=0-3": "--array=0-1",
        "elastic-array.sbatch": str(SCRIPTS / "elastic-array.sbatch"),
        "CONFIG": config,
    }
    variables, (_, *words) = command("slurm.md", "ETCD=@$PWD", filled)
    array = slurm.submit("-D", str(tmp_path), "-o", str(tmp_path / "log-%A_%a"), *words, **variables, **path)
    term = until_world(run, 2)
    lost_at_s = time.time()
    slurm.machines.power_off("n3")
    term = until_world(run, 1, above=term)
    took_s = first_step_s(run, term) - lost_at_s
    record_property("Slurm: seconds from power loss to the next step, with a lease of 3 s", took_s)
    done.touch()
    left = next(f"{array}_{i}" for i in (0, 1) if slurm.job(f"{array}_{i}")["NodeList"] == "n2")
    slurm.await_state(left, "COMPLETED", timeout_s=PATIENCE_S)
    assert steps_done_twice(run) == []


def test_a_late_first_node_is_waited_for(
    slurm: SlurmCluster, tmp_path: Path, rows: Path, launcher: str, path: dict[str, str]
) -> None:
    """It starts the job's etcd 20 s after they have said that they wait: they ended after 15 s, and it was alone."""
    config = write_patient_config(tmp_path, rows, 5, lane_ms=0.0)
    script, node = tmp_path / "job", tmp_path / "node"
    said = f"[ $(grep -c 'waiting for the first node' {tmp_path}/log) -ge 2 ]"
    node.write_text(
        f"#!/bin/sh\n[ $SLURM_PROCID -ne 0 ] || {{ until {said}; do sleep 1; done; sleep 20; }}\n"
        f"exec {launcher} launch {config} --nodes 3\n"
    )
    node.chmod(0o755)
    script.write_text(f"#!/bin/sh\nsrun --ntasks-per-node=1 {node}\necho code $?\n")
    job = slurm.submit("--nodes=3", "-o", str(tmp_path / "log"), str(script), **path)
    slurm.await_state(job, "COMPLETED", timeout_s=PATIENCE_S)
    log = (tmp_path / "log").read_text()
    assert "code 0" in log.splitlines(), log
    assert set(worlds(tmp_path / "run")) == {3}


def test_an_etcd_of_three_nodes_survives_one_of_them(slurm: SlurmCluster, tmp_path: Path, path: dict[str, str]) -> None:
    """etcd.sbatch: what was written before a node lost its power is there, and more can be written."""
    control = Path(find_binary()).with_name("etcdctl")
    if not control.exists():
        pytest.skip(f"no {control} here: install it (Debian: etcd-client)")
    where = start_etcd(slurm, tmp_path, path)

    def ask(*words: str) -> str:
        asked = ["env", "ETCDCTL_API=3", str(control), f"--endpoints={where}", *words]
        done = subprocess.run(
            slurm.machines["n2"].inside(*asked), capture_output=True, text=True, check=False, timeout=200
        )
        return done.stdout.strip() if done.returncode == 0 else done.stderr

    eventually(lambda: ask("put", "before", "1") == "OK", "a majority answers", PATIENCE_S)
    slurm.machines.power_off("n3")
    eventually(lambda: ask("put", "after", "2") == "OK", "two of three answer", PATIENCE_S)
    assert ask("get", "before", "--print-value-only") == "1"
    assert "unhealthy" in ask("endpoint", "health")
