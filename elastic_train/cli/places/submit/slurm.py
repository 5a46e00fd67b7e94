"""A batch script for Slurm: one of `deploy/slurm`, with the job's options and arguments written into it.

It stands for itself: what `--dry-run` prints is what is submitted, and can be kept and submitted again.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elastic_train.errors import ConfigError, ElasticTrainError
from elastic_train.launch.options import parse_nodes

SCRIPTS = Path(__file__).parents[1] / "deploy" / "slurm"
LEAVE_S = 120
"""How long before its end a job is asked to leave; the scripts say so, too (--signal)."""
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """What is to be submitted; with `is_array` as an array of one-node jobs."""

    config: Path
    overrides: tuple[str, ...]
    nodes: str
    time: str | None = None
    endpoint: str | None = None
    run_id: str | None = None
    gpus: int | None = None
    is_array: bool = False
    options: tuple[str, ...] = ()
    """More of sbatch's own, such as --partition=gpu."""

    def problems(self) -> Iterator[str]:
        """Yield all that is wrong with it."""
        wrong: list[str] = []
        parse_nodes(self.nodes, wrong)
        yield from wrong
        if self.time is not None and (seconds := seconds_of(self.time)) is not None and seconds <= LEAVE_S:
            yield f"--time {self.time}: the job is asked to leave {LEAVE_S} s before its end; give it more"
        elif self.time is not None and seconds_of(self.time) is None:
            yield f"--time {self.time!r} is not MINUTES, HH:MM:SS or DAYS-HH[:MM[:SS]]"
        if self.gpus is not None and self.gpus < 1:
            yield f"--gpus must be at least 1, not {self.gpus}; leave it out for a job on CPUs"
        if self.is_array and self.endpoint is None:
            yield "--array needs --endpoint HOST:PORT of an etcd that is in none of its jobs (deploy/slurm/etcd.sbatch)"
        if self.is_array and self.run_id is None:
            yield "--array needs --id NAME, by which its jobs find each other"
        for each in self.options:
            if not each.startswith("--"):
                yield f"--sbatch {each!r} is not an option of sbatch: write --NAME or --NAME=VALUE"
        if not self.is_array and self.run_id is not None:
            yield "--id is for --array; a job of one allocation is named by Slurm's number"


def seconds_of(time: str) -> int | None:
    """Return a time limit as Slurm reads it, in seconds; None if it is none."""
    found = _TIME.fullmatch(time)
    if found is None:
        return None
    days, *parts = (int(part) if part else 0 for part in found.groups())
    if found[1] is not None or found[4] is not None:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = parts
    else:  # minutes[:seconds]
        hours, (minutes, seconds) = 0, parts[:2]
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def render(job: SlurmJob) -> str:
    """Return the batch script; raises ConfigError with all that is wrong."""
    if problems := list(job.problems()):
        raise ConfigError(*problems)
    lines = (SCRIPTS / ("elastic-array.sbatch" if job.is_array else "train.sbatch")).read_text().splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    arguments = shlex.join([str(job.config), *job.overrides])
    own = [*(f"#SBATCH {option}" for option in _options(job)), f"set -- {arguments}", *_variables(job)]
    return "\n".join([*lines[: last + 1], *own, *lines[last + 1 :]]) + "\n"


def _options(job: SlurmJob) -> Iterator[str]:
    least, most = parse_nodes(job.nodes, [])
    if job.is_array:
        yield f"--array=0-{most - 1}"
        yield f"--job-name={job.run_id}"
    else:
        yield f"--nodes={least}" if least == most else f"--nodes={least}-{most}"
    if job.time is not None:
        yield f"--time={job.time}"
    if job.gpus is not None:
        yield f"--gpus-per-node={job.gpus}"
    yield from job.options


def _variables(job: SlurmJob) -> Iterator[str]:
    if job.endpoint is not None:
        yield f"export ETCD={shlex.quote(job.endpoint)}"
    if job.is_array:
        least, most = parse_nodes(job.nodes, [])
        yield f"export RUN={shlex.quote(job.run_id or '')} MIN={least} MAX={most}"


def submit(script: str) -> str:
    """Submit a batch script; return the job's number. ConfigError where there is no Slurm, or it refuses the job."""
    if shutil.which("sbatch") is None:
        raise ConfigError("sbatch is not on PATH: submit on a login node, or print the script with --dry-run")
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ElasticTrainError(f"sbatch refuses the job: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
