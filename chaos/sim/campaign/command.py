"""`elastic-chaos sim`: run many seeds, print a one-line summary, and say how to replay the first failure."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from chaos.errors import ScenarioError
from chaos.ledger import Ledger, code_version
from chaos.sim.campaign import cases
from chaos.sim.campaign.long_runs import Draw
from chaos.sim.campaign.planted.hunt import SimBug
from chaos.sim.campaign.pool import simulate_each
from chaos.sim.campaign.shrink import shrink
from chaos.sim.campaign.simulate import Case, Outcome, simulate
from chaos.sim.campaign.swarm import APART, AT_PLACES, COMMON

console = Console(markup=False, soft_wrap=True, highlight=False)
SHOW_EVERY_S = 5.0
SAVED = Path("runs/sim")


class Tally:
    """Totals over all runs."""

    def __init__(self) -> None:
        self.num_run = 0
        self.is_interrupted = False
        self.entries: list[Entry] = []
        self._started = time.monotonic()

    @property
    def num_valid(self) -> int:
        return sum(not entry.violated for entry in self.entries)

    @property
    def failed(self) -> list[int]:
        return sorted(entry.seed for entry in self.entries if entry.violated)

    @property
    def num_faults(self) -> int:
        return sum(sum(entry.faults.values()) for entry in self.entries)

    @property
    def virtual_hours(self) -> float:
        return sum(entry.virtual_s for entry in self.entries) / 3600

    @property
    def runs_per_s(self) -> float:
        return self.num_run / max(1e-9, time.monotonic() - self._started)

    @property
    def digest(self) -> str:
        entries = sorted(self.entries, key=lambda entry: entry.seed)
        return hashlib.sha256("".join(entry.digest for entry in entries).encode()).hexdigest()

    def fields(self, options: str = "") -> dict[str, object]:
        """Return the fields of `--json`; `digest` covers all histories and is the same for the same seeds."""
        faults: Counter[str] = Counter()
        for entry in self.entries:
            faults.update(entry.faults)
        unknown = Counter(name for entry in self.entries for name in entry.unknown)
        command = " ".join(["elastic-chaos sim", *([options] if options else [])])
        return {
            "seeds": len(self.entries),
            "valid": self.num_valid,
            "failed": self.failed,
            "faults": self.num_faults,
            "faults_by_kind": dict(sorted(faults.items())),
            "never_came": [name for name in (*COMMON, *APART, *AT_PLACES) if name not in faults],
            "unknown": dict(sorted(unknown.items())),
            "virtual_hours": round(self.virtual_hours, 3),
            "runs_per_s": round(self.runs_per_s, 2),
            "digest": self.digest,
            "replay": f"{command} --seed {self.failed[0]}" if self.failed else None,
        }

    def __str__(self) -> str:
        valid = f"{self.num_valid} of {len(self.entries)} seeds valid, {self.num_faults} faults"
        return f"{valid}, {self.virtual_hours:.2f} virtual hours, {3600 * self.runs_per_s:.0f} runs/h"


def seeds_of(text: str) -> range:
    """Parse A:B, or N for 0:N; raise ScenarioError for anything else or an empty range."""
    lo, colon, hi = text.rpartition(":")
    try:
        seeds = range(int(lo or 0), int(hi))
    except ValueError:
        raise ScenarioError(f"--seeds {text}: give a number of seeds, or A:B for the seeds from A up to B") from None
    if not seeds or seeds.start < 0:
        raise ScenarioError(f"--seeds {text}: the range is empty; give seeds from 0 up, as 200 or 0:200")
    del colon
    return seeds


@dataclass(frozen=True, slots=True)
class Campaign:
    """A set of runs: seeds, how cases are drawn from them, and the number of processes.

    `ledger` is the file that records each seed's outcome; seeds already in it with the same options are skipped.
    """

    seeds: range
    draw: Draw = field(default_factory=Draw)
    processes: int = 1
    ledger: Path | None = None


def run_campaign(campaign: Campaign, *, is_quiet: bool) -> Tally:
    """Run every seed; with a ledger, Ctrl-C also ends the campaign."""
    tally, shown_at = Tally(), time.monotonic()
    ledger = None if campaign.ledger is None else open_ledger(campaign.ledger)
    options, code = campaign.draw.options, code_version()
    if ledger is not None:
        tally.entries += [e for e in ledger.entries if e.seed in campaign.seeds and e.options == options]
    left = sorted(set(campaign.seeds) - {entry.seed for entry in tally.entries})
    outcomes = simulate_each(left, campaign.draw.case, min(campaign.processes, len(left) or 1))
    with contextlib.closing(outcomes), _ending_at_interrupt(tally) if ledger else contextlib.nullcontext():
        for outcome in outcomes:
            entry = entry_of(outcome, options, code)
            tally.num_run += 1
            tally.entries.append(entry)
            if ledger is not None:
                ledger.add(entry)
            if outcome.violations and not is_quiet:
                _print_violations(outcome)
            if not is_quiet and time.monotonic() - shown_at > SHOW_EVERY_S:
                shown_at = time.monotonic()
                console.print(str(tally))
    return tally


@contextlib.contextmanager
def _ending_at_interrupt(tally: Tally) -> Iterator[None]:
    """On Ctrl-C, stop and keep what has been run."""
    try:
        yield
    except KeyboardInterrupt:
        tally.is_interrupted = True


def report(tally: Tally, campaign: Campaign, is_json: bool) -> int:
    """Print the result; return 0 if every run was valid. Shrink and save the first failure unless interrupted."""
    fields = tally.fields(campaign.draw.options)
    if not is_json:
        table = Table("fault", "times", header_style="bold")
        for kind, times in fields["faults_by_kind"].items():  # type: ignore[attr-defined]
            table.add_row(kind, str(times))
        console.print(table)
        if never := fields["never_came"]:
            console.print(f"never came: {', '.join(never)}", markup=False)  # type: ignore[arg-type]
        console.print(f"{tally}\ndigest {tally.digest}")
    if tally.failed and tally.is_interrupted:
        sys.stderr.write(f"again with: {fields['replay']}\n")
    elif tally.failed:
        first = simulate(campaign.draw.case(tally.failed[0]))
        what = f"seed {tally.failed[0]} was recorded as bad, and is not with today's code\n"
        if first.violations:
            path = keep(first)
            bad = first.violations[0]
            what = f"violated: {bad.invariant}: {bad.why}\nshrunk with: elastic-chaos sim --case {path}\n"
        sys.stderr.write(f"{what}again with: {fields['replay']}\n")
    if is_json:
        sys.stdout.write(json.dumps(fields) + "\n")
    return 1 if tally.failed else 0


def run_one(case: Case, is_json: bool, replay: str, *, is_scenario: bool = False) -> int:
    """Run one case and show every finding; return 0 if it is valid.

    In a scenario no finding may be `unknown`, as in a real run; in any other case at least one fault must take effect.
    """
    outcome = simulate(case)
    is_bad = bool(outcome.violations) or bool(case.faults and not outcome.num_faults)
    is_bad = is_bad or (is_scenario and any(finding.truth != "true" for finding in outcome.findings))
    _show(outcome, is_json, replay, is_bad=is_bad)
    return int(is_bad)


def run_planted(bug: SimBug, is_json: bool) -> int:
    """Run a planted bug's cases until one of its invariants is violated; show that run and return 1, else return 0.

    Finding nothing is the failure here, and is reported as such.
    """
    found, num_runs = bug.hunt()
    if found is None:
        sys.stderr.write(f"{bug.name}: {bug.bug}, and the judge found nothing in {num_runs} runs\n")
        return 0
    if not is_json:
        console.print(f"planted: {bug.bug}; found in run {num_runs}, by {' or '.join(bug.invariants)}", markup=False)
    _show(found, is_json, f"elastic-chaos sim --plant {bug.name}", is_bad=True)
    return 1


def _show(outcome: Outcome, is_json: bool, replay: str, *, is_bad: bool) -> None:
    tally = Tally()
    tally.entries.append(entry_of(outcome, "", ""))
    if is_json:
        findings = {finding.invariant: finding.truth for finding in outcome.findings}
        outcomes = {"valid": int(not is_bad), "digest": outcome.digest, "replay": replay, "invariants": findings}
        sys.stdout.write(json.dumps({**tally.fields(), **outcomes}) + "\n")
        return
    for fault in outcome.case.faults:
        when = f"at the {fault.nth}. {fault.point}" if fault.point else f"at {fault.at_s:.2f} s"
        console.print(f"{fault.kind} {when}, node {fault.node}, for {fault.for_s:.2f} s")
    table = Table("invariant", "verdict", "because", header_style="bold")
    for finding in outcome.findings:
        table.add_row(finding.invariant, finding.truth, finding.why)
    console.print(table)
    console.print(f"{'NOT VALID' if is_bad else 'VALID'}, digest {outcome.digest}; again with: {replay}", markup=False)


def keep(outcome: Outcome) -> Path:
    """Shrink a failing run, save it and return its path."""
    broken = {finding.invariant for finding in outcome.violations}

    def fails(case: Case) -> bool:
        return any(finding.invariant in broken for finding in simulate(case).violations)

    path = SAVED / f"seed-{outcome.case.seed}.yaml"
    first = outcome.violations[0]
    cases.save(shrink(outcome.case, fails), path, f"{first.invariant}: {first.why}")
    return path


def _print_violations(outcome: Outcome) -> None:
    for finding in outcome.violations:
        console.print(f"seed {outcome.case.seed}: {finding.invariant} is {finding.truth}: {finding.why}")


DIGITS = 16
"""Number of hexadecimal digits kept of a digest."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The recorded outcome of one seed."""

    seed: int
    options: str
    code: str
    nodes: int
    digest: str
    virtual_s: float
    faults: Mapping[str, int]
    unknown: tuple[str, ...]
    violated: tuple[str, ...]


def entry_of(outcome: Outcome, options: str, code: str) -> Entry:
    return Entry(
        seed=outcome.case.seed,
        options=options,
        code=code,
        nodes=outcome.case.shape.nodes,
        digest=outcome.digest[:DIGITS],
        virtual_s=round(outcome.virtual_s, 3),
        faults=dict(outcome.num_faults),
        unknown=tuple(finding.invariant for finding in outcome.findings if finding.truth == "unknown"),
        violated=tuple(finding.invariant for finding in outcome.violations),
    )


def open_ledger(path: Path) -> Ledger[Entry]:
    """Open the ledger of a campaign.

    A line names the options that drew the case and the commit that ran it, because its digest depends on both; a
    seed with the same options need not run again.
    """
    return Ledger(
        path, lambda line: Entry(**{**line, "unknown": tuple(line["unknown"]), "violated": tuple(line["violated"])})
    )
