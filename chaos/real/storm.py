"""A storm: one soak after another over all layouts, until there were enough real faults; each has a verdict and a line.

A ledger keeps the lines, so that a storm that was interrupted continues. Folders of jobs that are not valid stay.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chaos.errors import ChaosError, ScenarioError
from chaos.judge.verdict import Verdict
from chaos.ledger import Ledger, code_version
from chaos.scenario.layouts import LAYOUTS
from chaos.scenario.model import Scenario
from chaos.scenario.networks import NETWORKS
from elastic_train.errors import ConfigError, ElasticTrainError

IN_VAIN = 10
"""Jobs in a row that ended before a fault, after which no more are begun."""
Execute = Callable[[Scenario, int, Path, str], Verdict]
"""Runs and judges a scenario with a seed, in a folder; the text is the command that does it again."""


@dataclass(frozen=True, slots=True)
class Storm:
    """The faults of a storm: how many, and how many of them for each job; `seed` is that of the first job."""

    faults: int
    per_job: int
    seed: int
    layouts: Sequence[str]
    folder: Path
    network: str | None = None

    def __post_init__(self) -> None:
        """Raise ScenarioError with everything that is wrong."""
        known, counts = ", ".join(LAYOUTS), {"faults": self.faults, "per-job": self.per_job}
        wrong = [f"--layouts {name}: there are {known}" for name in self.layouts if name not in LAYOUTS]
        wrong += [f"--{key} {count}: give 1 or more" for key, count in counts.items() if count < 1]
        if self.network is not None and self.network not in NETWORKS:
            wrong.append(f"--network {self.network}: there are {', '.join(NETWORKS)}")
        if wrong:
            raise ScenarioError(*wrong)

    @property
    def options(self) -> str:
        """The options that decide what a job is."""
        network = ["--network", self.network] if self.network else []
        names = ["--layouts", ",".join(self.layouts)] if list(self.layouts) != list(LAYOUTS) else []
        return shlex.join(["--per-job", str(self.per_job), "--seed", str(self.seed), *names, *network])

    @property
    def replay(self) -> str:
        """The command that continues the storm."""
        return f"elastic-chaos storm --faults {self.faults} {self.options} --out {shlex.quote(str(self.folder))}"


@dataclass(frozen=True, slots=True)
class Entry:
    """The outcome of one job; `violated` and `unknown` are invariants, `error` why there is no verdict."""

    job: int
    layout: str
    seed: int
    options: str
    code: str
    valid: bool
    faults: Mapping[str, int]
    violated: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    seconds: float = 0.0
    weights_sha256: str | None = None
    error: str | None = None
    is_stopped: bool = False

    @property
    def num_faults(self) -> int:
        return sum(self.faults.values())

    def __str__(self) -> str:
        verdict = "VALID" if self.valid else f"NOT VALID ({self.error or ', '.join((*self.violated, *self.unknown))})"
        what = f"job {self.job}, {self.layout}, seed {self.seed}"
        return f"{what}: {self.num_faults} faults, {self.seconds:.0f} s, {verdict}"


@dataclass(slots=True)
class Tally:
    """The outcomes of a storm."""

    entries: list[Entry] = field(default_factory=list)

    @property
    def num_faults(self) -> int:
        return sum(entry.num_faults for entry in self.entries)

    @property
    def failed(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.valid]

    def fields(self) -> dict[str, object]:
        kinds, layouts = Counter[str](), Counter[str]()
        for entry in self.entries:
            kinds.update(entry.faults)
            layouts[entry.layout] += entry.num_faults
        return {
            "valid": not self.failed,
            "jobs": len(self.entries),
            "faults": self.num_faults,
            "faults_by_layout": dict(layouts),
            "faults_by_kind": dict(sorted(kinds.items())),
            "seconds": round(sum(entry.seconds for entry in self.entries), 1),
            "failed": [asdict(entry) for entry in self.failed],
        }

    def __str__(self) -> str:
        kinds = len({kind for entry in self.entries for kind in entry.faults})
        num_valid = len(self.entries) - len(self.failed)
        return f"{num_valid} of {len(self.entries)} jobs valid, {self.num_faults} faults of {kinds} kinds"


def open_storm(path: Path) -> Ledger[Entry]:
    def read(line: Mapping[str, Any]) -> Entry:
        return Entry(**{**line, "violated": tuple(line["violated"]), "unknown": tuple(line["unknown"])})

    return Ledger(path, read)


def run_storm(storm: Storm, execute: Execute, say: Callable[[str], None]) -> Tally:
    """Run jobs until there were enough faults, or one was stopped by Ctrl-C; continue where the ledger ends.

    Raises ScenarioError or ConfigError if a job cannot be configured: then no job can.
    """
    ledger = open_storm(storm.folder / "ledger.jsonl")
    code, tally = code_version(), Tally([entry for entry in ledger.entries if entry.options == storm.options])
    try:
        for job in _jobs_left(storm, tally):
            entry = _run_job(storm, job, code, execute)
            ledger.add(entry)
            tally.entries.append(entry)
            say(f"{entry}; {tally}")
            if entry.is_stopped:
                break
            if len(tally.entries) >= IN_VAIN and not any(entry.faults for entry in tally.entries[-IN_VAIN:]):
                say(f"the last {IN_VAIN} jobs ended before a fault: no more are begun")
                break
    finally:
        ledger.close()
    return tally


def _jobs_left(storm: Storm, tally: Tally) -> Iterator[int]:
    """Yield the numbers of jobs until there were enough faults; the ledger's jobs have run."""
    done, job = {entry.job for entry in tally.entries}, 0
    while tally.num_faults < storm.faults:
        if job not in done:
            yield job
        job += 1


def _run_job(storm: Storm, job: int, code: str, execute: Execute) -> Entry:
    name, seed, began = storm.layouts[job % len(storm.layouts)], storm.seed + job, time.monotonic()
    folder = storm.folder / f"{job:05d}-{name}"
    known: dict[str, Any] = {"job": job, "layout": name, "seed": seed, "options": storm.options, "code": code}
    scenario = LAYOUTS[name].scenario(name, storm.per_job).model_copy(update={"network": storm.network})
    network = f" --network {storm.network}" if storm.network else ""
    again = f"elastic-chaos storm --layouts {name} --per-job {storm.per_job} --faults 1 --seed {seed}{network}"
    try:
        verdict = execute(scenario, seed, folder, again)
    except (ScenarioError, ConfigError):
        raise
    except (ChaosError, ElasticTrainError, OSError) as error:
        return Entry(**known, valid=False, faults={}, seconds=time.monotonic() - began, error=str(error))
    if verdict.is_valid:
        shutil.rmtree(folder)
    truths = {truth: tuple(f.invariant for f in verdict.findings if f.truth == truth) for truth in ("false", "unknown")}
    faults, digest = verdict.fields["faults_by_kind"], verdict.fields["weights_sha256"]
    assert isinstance(faults, dict), "the verdict counts them"
    return Entry(
        **known,
        valid=verdict.is_valid,
        faults=faults,
        violated=truths["false"],
        unknown=truths["unknown"],
        seconds=round(time.monotonic() - began, 1),
        weights_sha256=None if digest is None else str(digest),
        is_stopped=verdict.run.has("stopped"),
    )
