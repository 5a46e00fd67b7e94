"""The cluster that the other tests here stand on: Slurm's own programs on machines that can be lost."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from chaos.errors import RunError
from chaos.services.slurm.cluster import SlurmCluster
from chaos.services.slurm.machines import eventually
from rendezvous.process_table import is_stopped

pytestmark = [pytest.mark.deploy, pytest.mark.xdist_group("slurm-codes")]


def test_nodes_have_a_name_an_address_and_a_tmp_of_their_own(slurm: SlurmCluster, tmp_path: Path) -> None:
    """And share the folder that the cluster was given, as nodes share their storage."""
    (tmp_path / "shared").write_text("seen by all")
    (Path("/tmp") / "of-this-machine").touch()
    script = f"echo $(hostname) $(cat /etc/hosts | grep -c 10.77) $(ls /tmp | grep -c machine) $(cat {tmp_path}/shared)"
    said = slurm.run("srun", "-N3", "sh", "-c", script)
    assert sorted(said.splitlines()) == [f"n{i} 4 0 seen by all" for i in (1, 2, 3)]
    with pytest.raises(RunError, match="exit code 3"):
        slurm.run("srun", "sh", "-c", "exit 3")


def test_nodes_have_the_launcher_wherever_its_sources_and_its_environment_are(
    slurm: SlurmCluster, launcher: str
) -> None:
    """Of a clone below /tmp they had none, and each job's test waited five minutes for its world."""
    assert len(set(slurm.run("srun", "-N3", launcher, "--version").splitlines())) == 1


def test_a_node_without_power_is_down_and_its_job_requeued(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Slurm notices by itself; a booted node is idle again, and a frozen one stops and continues."""
    (tmp_path / "job").write_text(f"#!/bin/sh\nhostname >> {tmp_path}/ran; sleep 100\n")
    job = slurm.submit("--requeue", "-w", "n2", "-o", "/dev/null", str(tmp_path / "job"))
    eventually((tmp_path / "ran").exists, "it runs")
    slurm.machines.power_off("n2")
    with pytest.raises(RunError, match="n2 is off"):
        slurm.machines["n2"]
    slurm.await_state(job, "PENDING")
    slurm.boot("n2")
    eventually(lambda: (tmp_path / "ran").read_text().split() == ["n2", "n2"], "it ran again")
    slurm.machines.freeze("n3")
    frozen = [pid for pid in slurm.machines["n3"].processes() if is_stopped(pid)]
    assert slurm.machines["n3"].init in frozen
    assert len(frozen) > 1
    slurm.machines.thaw("n3")
    eventually(lambda: not any(is_stopped(pid) for pid in frozen), "they go on")


def test_nothing_is_left_when_it_is_closed(slurm: SlurmCluster) -> None:
    """All processes of a machine that lost power are gone."""
    asleep = "987654.25"
    subprocess.Popen(slurm.machines["n1"].inside("setsid", "-f", "sleep", asleep)).wait()
    running = ["pgrep", "-f", f"^sleep {asleep}"]
    eventually(lambda: subprocess.run(running, capture_output=True, check=False).returncode == 0, "it runs")
    slurm.machines.power_off("n1")
    assert subprocess.run(running, capture_output=True, check=False).returncode == 1
