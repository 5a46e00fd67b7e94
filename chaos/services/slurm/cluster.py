"""A real Slurm cluster: Debian's slurmctld and munged on the machine `ctl`, slurmd on the nodes, and the commands.

It is configured like a production cluster but with shorter timeouts: a node that is silent for some seconds is down,
and requeued jobs are scheduled within seconds. Jobs of the partition `urgent` preempt those of `main`, which get a
signal, have `GRACE_S` seconds, and are requeued.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from chaos.errors import ChaosError, RunError
from chaos.services.slurm.machines import LOGIN, LOOK_EVERY_S, Machines, eventually, why_no_machines

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "tini")
PACKAGES = "slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins tini"
"""Debian package names; install with --no-install-recommends."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
GRACE_S, KILL_WAIT_S = 100, 100
"""Seconds from the signal to the end of a preempted job, and from SIGTERM to SIGKILL of any other job. Long, so that a
busy machine causes no kills."""
CPUS = 4
"""CPUs of a node, as configured in Slurm."""
COMMAND_TIMEOUT_S = 300.0
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"})

_LOGIN_PROGRAM = """
mkdir -p /run/munge
mount -t tmpfs tmpfs /run/munge
chmod 755 /run/munge
mount -t tmpfs tmpfs /etc/slurm
cp "$1/slurm.conf" /etc/slurm/
munged -F --force --key-file="$1/munge/key" --socket=/run/munge/munge.socket.2 --pid-file="$1/munge/pid" \\
  --seed-file="$1/munge/seed" --log-file="$1/munge/log" &
until [ -S /run/munge/munge.socket.2 ]; do sleep 0.02; done
slurmctld -D -c &
calm=0 held=0 returned=0
while sleep 1; do
  requeued=$(squeue -h -r -t PENDING -o '%i %r' | sed -n 's/ BeginTime$//p')
  [ -n "$requeued" ] && held=$((held + 1)) || held=0
  before=$returned returned=$(grep -c 'returned to service' "$1/log/slurmctld.log")
  [ "$returned" = "$before" ] && [ -z "$(sinfo -h -t down -o %N)" ] || calm=0
  [ "$held" -ge 15 ] || [ "$held" -ge 2 -a "$calm" -ge 5 ] && for job in $requeued; do
    scontrol update jobid="$job" starttime=now
  done
  calm=$((calm + 1))
done
"""
"""Slurm lets a requeued job wait until its old credentials expire, 121 s by default. But nodes tell new ones from those
that they revoked by the second, so a second is enough, and five after a node has returned: Slurm tells it then to end
what it ran before, which would end the job if that was there again. A node that stays away is waited for 15 s.
A shorter `cred_expire` would fail steps that start slowly."""

_CONF = """\
ClusterName=fixture
SlurmctldHost=ctl({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=/run/munge/munge.socket.2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/state/slurmctld.pid
SlurmdPidFile={folder}/spool/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1
SlurmdTimeout=12
MessageTimeout=10
KillWait={kill_wait_s}
ReturnToService=2
CompleteWait=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
NodeName={names} CPUs={cpus} RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace_s} MaxTime=60 OverSubscribe=NO
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60
"""


class NoSlurmError(ChaosError):
    """No cluster can be started on this machine; the message says what is missing."""


def why_no_slurm() -> str | None:
    """Return why no cluster can be started here; None if one can."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        return f"no Slurm here, {', '.join(missing)} not found: apt-get install --no-install-recommends {PACKAGES}"
    return why_no_machines()


@contextlib.contextmanager
def folder_of_a_cluster() -> Iterator[Path]:
    """Yield a new folder for a cluster and delete it afterwards; its name is short, as it holds Slurm's sockets."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class SlurmCluster:
    """A cluster: `with SlurmCluster(folder, 3) as cluster: cluster.run("srun", "-N3", "hostname")`, nodes n1 to n3.

    `folder` is the cluster's own. It and any folders of `shared` below /tmp are visible to all nodes; everything else
    in /tmp is private to each node.
    """

    def __init__(self, folder: Path, num_nodes: int = 3, *, shared: Sequence[Path] = ()) -> None:
        self.folder = folder
        self.nodes = [f"n{i}" for i in range(1, num_nodes + 1)]
        for name in ("state", "spool", "log", "munge"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.machines = Machines(self.nodes, shared=[*shared, folder], hosts=folder / "hosts")
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        self._environ["PATH"] = PATH

    def start(self) -> None:
        """Start the cluster and return once all nodes are idle; raises NoSlurmError if it cannot be started."""
        if why := why_no_slurm():
            raise NoSlurmError(why)
        self._write_files()
        program = ("sh", "-c", _LOGIN_PROGRAM, "sh", str(self.folder))
        self.machines.switch_on_login(*program, environ=self._environ, log=self._log(LOGIN))
        # Booting a node copies the files of the controller's machine, so slurm.conf must exist before.
        eventually(lambda: bool(self._try("sinfo", "-h")), f"a controller that answers; {self.folder}/log says why")
        for name in self.nodes:
            self.boot(name)
        self.await_idle(len(self.nodes))

    def boot(self, name: str) -> None:
        """Boot a node; it becomes idle some time later."""
        program = ("tini", "-s", "--", "slurmd", "-D", "-N", name)
        self.machines.switch_on(name, *program, environ=self._environ, log=self._log(name))

    def restore(self, name: str) -> None:
        """Restore a node to its initial state after any fault; it becomes idle once its jobs have ended."""
        if not self.machines.is_on(name):
            self.boot(name)
        self.machines.plug(name, is_in=True)
        self.machines.thaw(name)
        if "drain" in (state := self.run("sinfo", "-h", "-p", "main", "-n", name, "-o", "%T")) or "down" in state:
            self._try("scontrol", "update", f"nodename={name}", "state=resume")

    def await_idle(self, num_nodes: int) -> None:
        eventually(lambda: len(self._try("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N")) >= num_nodes,
                   f"{num_nodes} idle nodes; {self.folder}/log says why")  # fmt: skip

    def run(self, *command: str, **environ: str) -> str:
        """Run a command on the login node and return its output; raises RunError if it fails."""
        done = self._run(command, environ)
        if done.returncode:
            raise RunError(f"{' '.join(command)}: exit code {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, *arguments: str, **environ: str) -> str:
        """Submit a batch script with its arguments; return the job's id."""
        return self.run("sbatch", "--parsable", *arguments, **environ).strip().partition(";")[0]

    def begin(self, *command: str, log: Path, node: str = LOGIN, **environ: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as said:
            return subprocess.Popen(
                self.machines[node].inside(*command),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**self._environ, **environ},
            )

    def job(self, job_id: str) -> dict[str, str]:
        """Return the fields of `scontrol show job` for a job, or for an array element such as 7_2."""
        shown = self.run("scontrol", "-o", "show", "job", job_id).splitlines()
        return dict(pair.split("=", 1) for pair in shown[-1].split() if "=" in pair)

    def state(self, job_id: str) -> str:
        return self.job(job_id)["JobState"]

    def await_state(self, job_id: str, *states: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Wait until a job has one of these states and return it; raises RunError if it ends otherwise or too late."""
        deadline = time.monotonic() + timeout_s
        while (state := self.state(job_id)) not in states:
            if state in ENDED or time.monotonic() > deadline:
                raise RunError(f"job {job_id} is {state}, and not {' or '.join(states)}")
            time.sleep(LOOK_EVERY_S)
        return state

    def close(self) -> None:
        self.machines.close()

    def __enter__(self) -> SlurmCluster:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, command: Sequence[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.machines[LOGIN].inside(*command),
            env={**self._environ, **environ},
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )

    def _try(self, *command: str) -> list[str]:
        """Return the output lines of a command; empty while the controller does not answer yet."""
        done = self._run(command, {})
        return [] if done.returncode else done.stdout.split()

    def _log(self, name: str) -> Path:
        return self.folder / "log" / f"{name}.out"

    def _write_files(self) -> None:
        key = self.folder / "munge" / "key"
        key.parent.chmod(0o700)
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        text = _CONF.format(
            controller=self.machines.addresses[LOGIN],
            folder=self.folder,
            names=",".join(self.nodes),
            cpus=CPUS,
            grace_s=GRACE_S,
            kill_wait_s=KILL_WAIT_S,
        )
        (self.folder / "slurm.conf").write_text(text)
