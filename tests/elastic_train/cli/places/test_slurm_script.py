"""Reactions of deploy/slurm/train.sbatch to its nodes' exit codes: its text runs with stand-ins for Slurm."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic_train.cli.places.submit.slurm import SCRIPTS
from tests.conftest import PATIENCE_S

PROGRAMS = {
    # Each node's code is a word of CODES. As Slurm's, it ends with the highest one, and a lost node (137) hides all.
    "srun": """
        while [ "$1" != bash ]; do shift; done
        export SCRIPT=$PPID SLURM_STEP_ID=0
        trap 'kill -USR1 $(cat "$STUB/pids") 2>/dev/null' USR1
        number=0 found=0
        for code in $CODES; do
          CODE=$code SLURM_PROCID=$number "$@" & pids="${pids:-} $!"
          number=$((number + 1))
        done
        echo $pids >"$STUB/pids.new"; mv "$STUB/pids.new" "$STUB/pids"
        for pid in $pids; do
          while wait $pid; kill -0 $pid 2>/dev/null; do :; done
          wait $pid; code=$?
          if [ $code = 137 ] || { [ $code -gt $found ] && [ $found != 137 ]; }; then found=$code; fi
        done
        exit $found""",
    "elastic-train": """
        if [ "$1" = status ]; then exit $STATUS; fi
        until [ -e "$STUB/pids" ]; do :; done
        touch "$STUB/up$SLURM_PROCID"
        if [ -n "${ASKED:-}" ] && [ "$SLURM_PROCID" = 0 ]; then
          number=0
          for code in $CODES; do until [ -e "$STUB/up$number" ]; do :; done; number=$((number + 1)); done
          kill -$ASKED "$SCRIPT"
        fi
        exit $CODE""",
    "scancel": """
        if [ -n "${NO_SCANCEL:-}" ]; then exit 1; fi
        kill -URG $(cat "$STUB/pids") 2>/dev/null""",
    "scontrol": """
        if [ "$1" != requeue ]; then exit 0; fi
        if [ -n "${NO_REQUEUE:-}" ]; then exit 1; fi
        touch "$STUB/requeued" """,
    "squeue": "echo RUNNING",
    "sleep": 'if [ "$1" != 60 ]; then exec /bin/sleep "$1"; fi',
}


@dataclass(frozen=True, slots=True)
class Slurm:
    """Programs of Slurm's names in a folder."""

    folder: Path

    def end(self, codes: str, script: str = "train.sbatch", **environ: str) -> tuple[int, bool]:
        """Run a script on nodes whose launchers end so; return its exit code, and whether it had itself requeued."""
        for left in (*self.folder.glob("pids"), *self.folder.glob("up*")):  # by an earlier job, whose nodes are gone
            left.unlink()
        own = {"STUB": str(self.folder), "PATH": f"{self.folder}:{os.environ['PATH']}", "CODES": codes}
        job = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "LOOK_S": "50", "STATUS": "75", **environ}
        done = subprocess.run(
            ["bash", str(SCRIPTS / script), "c.yaml"], env=own | job, cwd="/proc", timeout=PATIENCE_S, check=False
        )
        return done.returncode, (self.folder / "requeued").exists()


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return Slurm(tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ("0 0", (0, False)),
        ("75 75 2", (75, True)),
        ("0 2 75", (75, True)),
        ("1 65 1", (65, False)),
        ("93 75 65", (75, True)),
        ("93 1 2", (2, False)),
        ("1 65 93", (65, False)),
        ("93 77", (93, False)),
        ("1 77", (77, False)),
        ("75 137", (137, False)),
    ],
)
def test_a_job_ends_as_its_nodes_do_in_a_folder_that_cannot_be_written(
    slurm: Slurm, codes: str, expected: tuple[int, bool]
) -> None:
    """The codes were files in the job's folder: with a full quota a job that was asked to leave had FAILED."""
    assert slurm.end(codes) == expected


@pytest.mark.slow
def test_a_lost_node_hides_neither_that_the_others_left_nor_that_the_run_is_done(slurm: Slurm) -> None:
    """Then srun's code is 137: the script knows whether it was asked to leave, and `status` what the run is."""
    assert slurm.end("0 137", STATUS="0") == (0, False)
    assert slurm.end("75 137", STATUS="65", ASKED="USR1") == (137, False)
    assert slurm.end("1 77", ASKED="USR1") == (77, False)
    assert slurm.end("75 137", ASKED="USR2") == (75, True)


@pytest.mark.slow
def test_nodes_wait_for_the_first_one_for_a_bounded_time(slurm: Slurm) -> None:
    """Without a sign that the first node is done, they would wait for ever."""
    assert slurm.end("1 1 1", NO_SCANCEL="1", WAIT_S="1") == (1, False)


@pytest.mark.parametrize(
    ("code", "more", "expected"),
    [
        ("75", {}, (75, True)),
        ("77", {}, (77, True)),
        ("77", {"STATUS": "0"}, (0, False)),
        ("77", {"SLURM_RESTART_COUNT": "24"}, (77, False)),
        ("77", {"SLURM_RESTART_COUNT": "3", "WAITS": "3"}, (77, False)),
        ("75", {"SLURM_RESTART_COUNT": "99"}, (75, True)),
        ("75", {"NO_REQUEUE": "1"}, (75, False)),
        ("65", {}, (65, False)),
        ("1", {"STATUS": "0"}, (0, False)),
    ],
)
def test_a_node_of_an_array_that_has_waited_in_vain_goes_back_into_the_queue(
    slurm: Slurm, code: str, more: dict[str, str], expected: tuple[int, bool]
) -> None:
    """Nobody else would bring it back; and not for ever, where etcd is gone for good."""
    (slurm.folder / "srun").write_text("#!/bin/bash\nexit $CODES\n")
    assert slurm.end(code, "elastic-array.sbatch", ETCD="e:1", RUN="q", **more) == expected


@pytest.mark.slow
def test_a_job_that_slurm_does_not_requeue_says_so(slurm: Slurm, capfd: pytest.CaptureFixture[str]) -> None:
    """As with `#SBATCH --no-requeue` in a copy of the script; it had waited a minute without a word."""
    assert slurm.end("75 75", NO_REQUEUE="1") == (75, False)
    assert "submit it again, and it continues" in capfd.readouterr().err
