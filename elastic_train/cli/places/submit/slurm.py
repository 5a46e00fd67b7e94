"""A batch script for Slurm: one of `deploy/slurm`, with the job's options and arguments written into it.

It stands for itself: what `--dry-run` prints is what is submitted, and can be kept and submitted again.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

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


LEAVE_S = 120
"""Seconds before its time limit at which a job is asked to leave; the scripts' --signal has the same number."""
_TIME = re.compile("(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?")
_RANKS = "one launcher runs on each node and starts its ranks: give --ranks and --gpus"
_NOT_SUBMITTED = "no job would be submitted: give --dry-run to see the script"
_NEVER = {
    "array": "give --array",
    "no-requeue": "a job that was asked to leave is requeued to continue",
    "wait": "submit prints the job's number at once",
    "wrap": "the script is the job",
    **dict.fromkeys(("ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-gpu"), _RANKS),
    **dict.fromkeys(("ntasks-per-core", "ntasks-per-socket", "ntasks-per-tres", "gpus-per-task"), _RANKS),
    **dict.fromkeys(("test-only", "help", "usage", "version"), _NOT_SUBMITTED),
}
"""Options that no value makes right, and what to do instead."""
_BY_VALUE = ("nodes", "time", "time-min", "gpus", "gpus-per-node", "gres", "signal", "no-kill", "job-name")
_EXPORTS = ("export", "export-file")
_OTHERS = ("mem", "gres-flags", "gpu-bind", "gpu-freq", "wait-all-nodes", "exclusive", "requeue")
"""Names that begin like one of ours."""
_KNOWN = (*_NEVER, *_BY_VALUE, *_EXPORTS, *_OTHERS)
_VARIABLES = {
    "SBATCH_ARRAY_INX": "array", "SBATCH_NO_REQUEUE": "no-requeue", "SBATCH_WAIT": "wait",
    "SBATCH_GPUS_PER_TASK": "gpus-per-task", "SBATCH_TIMELIMIT": "time", "SBATCH_GPUS": "gpus",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node", "SBATCH_GRES": "gres", "SBATCH_SIGNAL": "signal",
    "SBATCH_NO_KILL": "no-kill", "SBATCH_JOB_NAME": "job-name", "SBATCH_EXPORT": "export",
}  # fmt: skip


def contradictions(
    options: tuple[str, ...],
    environ: Mapping[str, str],
    *,
    flags: Flags,
    time: str | None,
    gpus: int | None,
    is_array: bool,
    variables: Mapping[str, str],
) -> Iterator[str]:
    """Yield what is wrong with options of sbatch, each of the form --NAME or --NAME=VALUE, and with its variables.

    They come from `--sbatch=...`, and from the variables SBATCH_*, which win over the lines of a script. sbatch
    takes the beginning of a name for the name, unless it is another's, too.
    """
    named = [(f"--sbatch={option}", *_split(option)) for option in options]
    named += [
        (f"{name}={environ[name]}", option, environ[name]) for name, option in _VARIABLES.items() if name in environ
    ]
    yield from _times([(where, value) for where, name, value in named if name in ("time", "time-min")], named, time)
    kept = [key for key, text in variables.items() if has_password(text)]
    for where, name, value in named:
        if name in _NEVER:
            yield f"{where} contradicts the script: {_NEVER[name]}"
        elif name == "nodes":
            yield from _nodes(where, value, flags.nodes or "", is_array=is_array)
        elif name in ("gpus", "gpus-per-node", "gres") and gpus is not None:
            yield from _gpus(where, name, value, gpus)
        elif name == "signal":
            yield from _signal(where, value, "" if is_array else "B:")
        elif name == "no-kill" and value == "off" and not is_array:
            yield f"{where} contradicts the script: the nodes that are left train on when one is lost"
        elif name == "job-name" and "/" in value:
            yield f"{where}: the log has the job's name (%x), and no file's name has a '/'"
        elif name in _EXPORTS and "ALL" not in value.split(",") and kept:
            yield (
                f"{where} would keep {', '.join(kept)} from the job, which the environment sets to an address with a "
                "password: write --sbatch=--export=ALL"
            )


def _split(option: str) -> tuple[str, str]:
    """Return an option's name, in full if its beginning was given, and its value."""
    name, _, value = option.removeprefix("--").partition("=")
    if name not in _KNOWN:
        name = next((known for known in _KNOWN if len(name) > 1 and known.startswith(name)), name)
    return name, value


def _times(limits: list[tuple[str, str]], named: list[tuple[str, str, str]], time: str | None) -> Iterator[str]:
    signals = [re.search("@([0-9]+)$", value) for _, name, value in named if name == "signal"]
    leave_s = next((int(found[1]) for found in reversed(signals) if found), LEAVE_S)
    given = [(f"--time {time}", time)] if time is not None else []
    if given and any(not where.startswith("--sbatch=--time-min") for where, _ in limits):
        yield f"{limits[0][0]} and --time {time}: give one of them"
    for where, value in (*given, *limits):
        seconds = seconds_of(value)
        if seconds is None:
            shown = f"--time {value!r}" if (where, value) in given else where
            yield f"{shown} is not MINUTES, HH:MM:SS or DAYS-HH[:MM[:SS]]"
        elif seconds <= leave_s:
            yield f"{where}: the job is asked to leave {leave_s} s before its end; give it more"


def seconds_of(time: str) -> float | None:
    """Return a time limit as Slurm reads it, in seconds; None if it is none. A limit of 0 is no limit."""
    if time.lower() in ("unlimited", "infinite"):
        return math.inf
    found = _TIME.fullmatch(time)
    if found is None:
        return None
    days, *parts = (int(part) if part else 0 for part in found.groups())
    if found[1] is not None or found[4] is not None:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = parts
    else:  # minutes[:seconds]
        hours, (minutes, seconds) = 0, parts[:2]
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds or math.inf


def _nodes(where: str, value: str, nodes: str, *, is_array: bool) -> Iterator[str]:
    """Yield why an allocation has other nodes than train: it may have some of MIN:MAX, and grow by other jobs."""
    wrong: list[str] = []
    least, most = parse_nodes(nodes, wrong)
    found = re.fullmatch("([0-9]+)(?:-([0-9]+))?", value)
    asked = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if wrong:
        return
    if is_array:
        yield f"{where} contradicts the script: each job of an array has one node; give --nodes MIN:MAX"
    elif not least <= asked[0] <= asked[1] <= most:
        yield f"{where} and --nodes {nodes}: give --nodes as many as the allocation has, or MIN:MAX around it"


def _gpus(where: str, name: str, value: str, gpus: int) -> Iterator[str]:
    counts = [part.split(":") for part in value.split(",")]
    if name == "gres":
        counts = [part for part in counts if part[0] in ("gpu", "gres/gpu")]
    asked = [part[-1] for part in counts]
    if asked and (name == "gpus" or asked != [f"{gpus}"]):
        yield f"{where} and --gpus {gpus}, of each node: give one of them"


def _signal(where: str, value: str, receiver: str) -> Iterator[str]:
    if re.fullmatch(f"{receiver}(SIG)?USR[12]@[1-9][0-9]*", value) is None:
        meant = f"--sbatch=--signal={receiver}USR1@SECONDS"
        yield f"{where}: the script is asked to leave by USR1 or USR2; write {meant}"
