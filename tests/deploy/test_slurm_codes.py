"""The scripts of deploy/slurm handle the nodes' exit codes on a real Slurm; a table sets each launcher's end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chaos.services.slurm.cluster import SlurmCluster
from tests.deploy.jobs import PATIENCE_S, SCRIPTS

pytestmark = [pytest.mark.deploy, pytest.mark.xdist_group("slurm-codes")]
LAUNCHER = """#!/bin/bash
if [ "$1" != launch ]; then exec "$(dirname "$0")/installed" "$@"; fi
read -ra codes <<<"$CODES"
exit ${codes[${SLURM_RESTART_COUNT:-0} * SLURM_NTASKS + SLURM_PROCID]}
"""
"""What it ends with is in CODES, that of each node, and then those of the job's next start."""


@pytest.fixture
def ending(path: dict[str, str], launcher: str) -> dict[str, str]:
    """The environment of jobs whose launcher is such a one, while `status` is that of the package."""
    program = Path(launcher)
    program.rename(program.with_name("installed"))
    program.write_text(LAUNCHER)
    program.chmod(0o755)
    return path


def ended(slurm: SlurmCluster, folder: Path, script: str, *words: str, **environ: str) -> tuple[str, str, str]:
    """Submit a script with a configuration and keys of it; return its job's state, exit code and number of restarts."""
    options = [word for word in words if word.startswith("--nodes=")]
    rest = [word for word in words if word not in options]
    out = ("-D", str(folder), "-o", str(folder / "log"))
    job = slurm.submit(*options, *out, str(SCRIPTS / script), str(folder / "c.yaml"), *rest, **environ)
    state = slurm.await_state(job, "COMPLETED", "FAILED", timeout_s=PATIENCE_S)
    found = slurm.job(job)
    return state, found["ExitCode"], found["Restarts"]


def write_run(folder: Path, name: str, *, is_done: bool) -> str:
    """Make a run's folder as one that is done leaves it, or an empty one; write a configuration that names it."""
    run = folder / name
    run.mkdir()
    if is_done:
        (run / "result.json").write_text(json.dumps({"status": "done", "step": 4, "epochs": 1}))
    (folder / "c.yaml").write_text(f"run: {{dir: {run}}}\ndata: {{train: nowhere}}\n")
    return str(run)


@pytest.mark.parametrize(
    ("codes", "state", "code", "restarts"),
    [
        ("75 75 2 0 0 0", "COMPLETED", "0:0", "1"),
        ("93 75 65 2 2 1", "FAILED", "2:0", "1"),
    ],
    ids=["one node's 2 beside 75", "fatal at its next start"],
)
def test_a_job_that_was_asked_to_leave_is_requeued_whatever_single_nodes_say(
    slurm: SlurmCluster, tmp_path: Path, ending: dict[str, str], codes: str, state: str, code: str, restarts: str
) -> None:
    """One node that was turned away kept all others from being requeued. (`test_slurm_script` has other codes.)"""
    write_run(tmp_path, "run", is_done=False)
    found = ended(slurm, tmp_path, "train.sbatch", "--nodes=3", CODES=codes, **ending)
    assert found == (state, code, restarts), (tmp_path / "log").read_text()


@pytest.mark.parametrize("script", ["train.sbatch", "elastic-array.sbatch"])
def test_a_failed_job_is_what_the_run_of_its_own_line_is(
    slurm: SlurmCluster, tmp_path: Path, ending: dict[str, str], script: str
) -> None:
    """The configuration names a run that is done, and the job's line another one, or the other way round."""
    job = {"CODES": "1", "RUN": "quality-1", "ETCD": "n1:2379", **ending}
    flags = ("--grace-s", "60", "--batch.micro-batch", "4")
    other = write_run(tmp_path, "other", is_done=False)
    own = write_run(tmp_path, "own", is_done=True)  # which the configuration names from here on
    assert ended(slurm, tmp_path, script, *flags, "--run.dir", other, **job)[:2] == ("FAILED", "1:0")
    (tmp_path / "c.yaml").write_text(f"run: {{dir: {other}}}\ndata: {{train: nowhere}}\n")
    assert ended(slurm, tmp_path, script, *flags, f"--run.dir={own}", **job)[0] == "COMPLETED"


def test_a_single_job_by_the_arrays_script_is_requeued(
    slurm: SlurmCluster, tmp_path: Path, ending: dict[str, str]
) -> None:
    """It joins an array, and has no number in one; its script ended with 1 instead."""
    write_run(tmp_path, "run", is_done=False)
    job = {"CODES": "75 0", "RUN": "quality-1", "ETCD": "n1:2379", **ending}
    found = ended(slurm, tmp_path, "elastic-array.sbatch", **job)
    assert found == ("COMPLETED", "0:0", "1"), (tmp_path / "log").read_text()
