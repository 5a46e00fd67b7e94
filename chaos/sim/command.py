"""`elastic-chaos sim`: many seeds, one line of what they add up to, and how to replay the first that fails."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from chaos.errors import ScenarioError
from chaos.sim import cases
from chaos.sim.ledger import Entry, Ledger, entry_of
from chaos.sim.pool import simulate_each
from chaos.sim.shrink import shrink
from chaos.sim.simulate import Case, Outcome, case_of, simulate

console = Console(soft_wrap=True, highlight=False)
SHOW_EVERY_S = 5.0
SAVED = Path("runs/sim")


class Tally:
    """What all runs add up to."""

    def __init__(self) -> None:
        self.num_seeds = self.num_valid = self.num_run = 0
        self.virtual_s = 0.0
        self.faults: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.failed: list[int] = []
        self._digest = hashlib.sha256()
        self._started = time.monotonic()

    def take(self, entry: Entry) -> None:
        """Count a seed, also one of an earlier run."""
        self.num_seeds += 1
        self.num_valid += not entry.violated
        self.virtual_s += entry.virtual_s
        self.faults.update(entry.faults)
        self.unknown.update(entry.unknown)
        self._digest.update(entry.digest.encode())
        if entry.violated:
            self.failed.append(entry.seed)

    @property
    def runs_per_s(self) -> float:
        return self.num_run / max(1e-9, time.monotonic() - self._started)

    def fields(self) -> dict[str, object]:
        """Return what --json prints: the digest is that of all histories, the same for the same seeds."""
        return {
            "seeds": self.num_seeds,
            "valid": self.num_valid,
            "failed": self.failed,
            "faults": sum(self.faults.values()),
            "faults_by_kind": dict(sorted(self.faults.items())),
            "unknown": dict(sorted(self.unknown.items())),
            "virtual_hours": round(self.virtual_s / 3600, 3),
            "runs_per_s": round(self.runs_per_s, 2),
            "digest": self._digest.hexdigest(),
            "replay": f"elastic-chaos sim --seed {self.failed[0]}" if self.failed else None,
        }

    def __str__(self) -> str:
        faults, hours = sum(self.faults.values()), self.virtual_s / 3600
        rate = f"{self.runs_per_s:.1f} runs/s"
        return f"{self.num_valid} of {self.num_seeds} seeds valid, {faults} faults, {hours:.2f} virtual hours, {rate}"


def seeds_of(text: str) -> range:
    """Read A:B, or N for 0:N."""
    lo, colon, hi = text.rpartition(":")
    try:
        seeds = range(int(lo or 0), int(hi))
    except ValueError:
        raise ScenarioError(f"--seeds {text}: give a number of seeds, or A:B for the seeds from A up to B") from None
    if not seeds or seeds.start < 0:
        raise ScenarioError(f"--seeds {text}: there is no seed in it")
    del colon
    return seeds


@dataclass(frozen=True, slots=True)
class Campaign:
    """What to run: seeds, how long at most, with how many nodes in place of the drawn ones, on how many processes.

    `ledger` is where each seed's outcome is kept; seeds that are in it already are not run again.
    """

    seeds: range
    minutes: float | None = None
    nodes: int | None = None
    processes: int = 1
    ledger: Path | None = None


def run_campaign(campaign: Campaign, *, is_quiet: bool) -> Tally:
    """Run seed after seed until they, or the minutes, are over."""
    tally, shown_at = Tally(), time.monotonic()
    until = None if campaign.minutes is None else time.monotonic() + 60 * campaign.minutes
    ledger = None if campaign.ledger is None else Ledger(campaign.ledger)
    done = [entry for entry in ledger.entries if entry.seed in campaign.seeds] if ledger else []
    for entry in done:
        tally.take(entry)
    left = sorted(set(campaign.seeds) - {entry.seed for entry in done}) if done else campaign.seeds
    with contextlib.closing(simulate_each(left, campaign.nodes, min(campaign.processes, len(left) or 1))) as outcomes:
        for outcome in outcomes:
            entry = entry_of(outcome)
            tally.num_run += 1
            tally.take(entry)
            if ledger is not None:
                ledger.add(entry)
            if outcome.violations and not is_quiet:
                _tell(outcome)
            if not is_quiet and time.monotonic() - shown_at > SHOW_EVERY_S:
                shown_at = time.monotonic()
                console.print(str(tally))
            if until is not None and time.monotonic() > until:
                break
    return tally


def report(tally: Tally, campaign: Campaign, is_json: bool) -> int:
    """Print what came of it; return 0 if no run was bad. The first bad one is shrunk and kept as a file."""
    if not is_json:
        table = Table("fault", "times", header_style="bold")
        for kind, times in sorted(tally.faults.items()):
            table.add_row(kind, str(times))
        console.print(table)
        console.print(f"{tally}\ndigest {tally.fields()['digest']}")
    if tally.failed:
        first = simulate(case_of(tally.failed[0], campaign.nodes))
        path = keep(first)
        nodes = "" if campaign.nodes is None else f" --nodes {campaign.nodes}"
        sys.stderr.write(
            f"violated: {first.violations[0].invariant}: {first.violations[0].why}\n"
            f"again with: {first.replay}{nodes}\n"
            f"shrunk with: elastic-chaos sim --case {path}\n"
        )
    if is_json:
        sys.stdout.write(json.dumps(tally.fields()) + "\n")
    return 1 if tally.failed else 0


def run_one(case: Case, is_json: bool) -> int:
    """Run one case and show every finding."""
    tally, outcome = Tally(), simulate(case)
    tally.take(entry_of(outcome))
    if is_json:
        findings = {finding.invariant: finding.truth for finding in outcome.findings}
        sys.stdout.write(json.dumps({**tally.fields(), "invariants": findings}) + "\n")
        return 1 if outcome.violations else 0
    for fault in case.faults:
        when = f"at the {fault.nth}. {fault.point}" if fault.point else f"at {fault.at_s:.2f} s"
        console.print(f"{fault.kind} {when}, node {fault.node}, for {fault.for_s:.2f} s")
    table = Table("invariant", "verdict", "because", header_style="bold")
    for finding in outcome.findings:
        table.add_row(finding.invariant, finding.truth, finding.why)
    console.print(table)
    console.print(f"digest {outcome.digest}")
    return 1 if outcome.violations else 0


def keep(outcome: Outcome) -> Path:
    """Shrink a bad run and write it down; return where."""
    broken = {finding.invariant for finding in outcome.violations}

    def fails(case: Case) -> bool:
        return any(finding.invariant in broken for finding in simulate(case).violations)

    path = SAVED / f"seed-{outcome.case.seed}.yaml"
    first = outcome.violations[0]
    cases.save(shrink(outcome.case, fails), path, f"{first.invariant}: {first.why}")
    return path


def _tell(outcome: Outcome) -> None:
    for finding in outcome.violations:
        console.print(f"seed {outcome.case.seed}: {finding.invariant} is {finding.truth}: {finding.why}")
