"""A batch script for Slurm: one of `deploy/slurm`, with the job's options and arguments written into it.

It stands for itself: what `--dry-run` prints is what is submitted, and can be kept and submitted again.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastic_train.cli.places.submit.sbatch_options import contradictions
from elastic_train.config.credentials import has_password
from elastic_train.errors import ConfigError, ElasticTrainError
from elastic_train.launch.options import Flags, parse_nodes
from rendezvous.errors import OptionError
from rendezvous.etcd.options import etcd_options, wrong_id

SCRIPTS = Path(__file__).parents[1] / "deploy" / "slurm"
_OPTION = re.compile("--[a-z][a-z0-9-]*(?:=[^\\n\\r]*)?")
_WRITE = "write --NAME or --NAME=VALUE, in one line, with the long name of one such as -N"
_ID = re.compile("[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job to be submitted; with `is_array` as an array of one-node jobs.

    Its nodes, etcd and name are those of `flags`, which its launchers are given.
    """

    config: Path
    overrides: tuple[str, ...]
    flags: Flags
    time: str | None = None
    gpus: int | None = None
    is_array: bool = False
    options: tuple[str, ...] = ()
    """More of sbatch's own, such as --partition=gpu."""
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The variables of whoever submits: sbatch reads SBATCH_*."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Keys that the environment sets, and to what: an option of sbatch, or of the site, may keep it from the job."""

    @property
    def nodes(self) -> str:
        return self.flags.nodes or ""

    def problems(self) -> Iterator[str]:
        """Yield all that is wrong with it."""
        wrong: list[str] = []
        parse_nodes(self.nodes, wrong)
        yield from wrong if self.nodes else ["--nodes N or MIN:MAX is needed"]
        yield from self.flags.problems()
        if self.gpus is not None and self.gpus < 1:
            yield f"--gpus must be at least 1, not {self.gpus}; leave it out for a job on CPUs"
        yield from self._wrong_meeting()
        wrong = [each for each in self.options if _OPTION.fullmatch(each) is None]
        yield from (f"--sbatch {each!r} is not an option of sbatch: {_WRITE}" for each in wrong)
        yield from contradictions(
            tuple(each for each in self.options if each not in wrong),
            self.environ,
            flags=self.flags,
            time=self.time,
            gpus=self.gpus,
            is_array=self.is_array,
            variables=self.variables,
        )

    def _wrong_meeting(self) -> Iterator[str]:
        """Yield what is wrong with where its nodes meet, and by what name."""
        endpoint, name = self.flags.endpoint, self.flags.run_id
        if self.is_array and endpoint is None:
            yield "--array needs --endpoint HOST:PORT of an etcd that is in none of its jobs (deploy/slurm/etcd.sbatch)"
        if self.is_array and name is None:
            yield "--array needs --id NAME, by which its jobs find each other"
        if name is not None and _ID.fullmatch(name) is None:
            yield f"--id {name!r} names jobs and their logs: write letters, digits, '.', '_' and '-' alone"
        elif name is not None:
            yield from wrong_id(name)
        if not self.is_array and name is not None and endpoint is None:
            yield "--id needs --endpoint HOST:PORT: a job that has its etcd on its own nodes is named by Slurm's number"
        if endpoint is not None:
            try:
                etcd_options(endpoint.replace("https://", ""))  # certificates are looked for on the job's nodes
            except OptionError as error:
                yield from (f"--endpoint: {problem}" for problem in error.problems)

    def arguments(self) -> list[str]:
        """Return what its script is given: the launcher's line, but for what the script adds."""
        least_most = self.nodes if ":" in self.nodes and not self.is_array else None
        name = None if self.is_array else self.flags.run_id
        flags = replace(self.flags, nodes=least_most, endpoint=None, run_id=name)
        variables = [f"--{key}={text}" for key, text in self.variables.items() if not has_password(text)]
        return [str(self.config), *flags.arguments(), *variables, *self.overrides]


def render(job: SlurmJob) -> str:
    """Return the batch script; raises ConfigError with all that is wrong."""
    if problems := list(job.problems()):
        raise ConfigError(*problems)
    lines = (SCRIPTS / ("elastic-array.sbatch" if job.is_array else "train.sbatch")).read_text().splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    own = [*(f"#SBATCH {_quoted(option)}" for option in _options(job)), f"set -- {shlex.join(job.arguments())}"]
    own += _variables(job)
    return "\n".join([*lines[: last + 1], *own, *lines[last + 1 :]]) + "\n"


def _quoted(option: str) -> str:
    """Return an option as sbatch reads it in a script, where a blank ends it and '#' begins a comment."""
    if re.search(r"""[\s"'\\#]""", option) is None:
        return option
    name, _, value = option.partition("=")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}="{escaped}"'


def _options(job: SlurmJob) -> Iterator[str]:
    least, most = parse_nodes(job.nodes, [])
    if job.is_array:
        yield f"--array=0-{most - 1}"
        yield f"--job-name={job.flags.run_id}"
    else:
        yield f"--nodes={least}" if least == most else f"--nodes={least}-{most}"
    if job.time is not None:
        yield f"--time={job.time}"
    if job.gpus is not None:
        yield f"--gpus-per-node={job.gpus}"
    yield from job.options


def _variables(job: SlurmJob) -> Iterator[str]:
    if job.flags.endpoint is not None:
        yield f"export ETCD={shlex.quote(job.flags.endpoint)}"
    if job.is_array:
        least, most = parse_nodes(job.nodes, [])
        yield f"export RUN={job.flags.run_id} MIN={least} MAX={most}"


def submit(script: str) -> str:
    """Submit a batch script; return the job's number. ConfigError where there is no Slurm, or it refuses the job."""
    if shutil.which("sbatch") is None:
        raise ConfigError("sbatch is not on PATH: submit on a login node, or print the script with --dry-run")
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ElasticTrainError(f"sbatch refuses the job: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
