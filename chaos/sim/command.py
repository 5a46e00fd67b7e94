"""`elastic-chaos sim`: many seeds, one line of what they add up to, and how to replay the first that fails."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from chaos.errors import ScenarioError
from chaos.sim import cases
from chaos.sim.shrink import shrink
from chaos.sim.simulate import Case, Outcome, case_of, simulate

console = Console(soft_wrap=True, highlight=False)
SHOW_EVERY_S = 5.0
SAVED = Path("runs/sim")


class Tally:
    """What all runs add up to."""

    def __init__(self) -> None:
        self.num_seeds = self.num_valid = 0
        self.virtual_s = 0.0
        self.faults: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.failed: list[Outcome] = []
        self._digest = hashlib.sha256()
        self._started = time.monotonic()

    def take(self, outcome: Outcome) -> None:
        self.num_seeds += 1
        self.num_valid += not outcome.violations
        self.virtual_s += outcome.virtual_s
        self.faults.update(outcome.num_faults)
        self.unknown.update(finding.invariant for finding in outcome.findings if finding.truth == "unknown")
        self._digest.update(outcome.digest.encode())
        if outcome.violations:
            self.failed.append(outcome)

    @property
    def runs_per_s(self) -> float:
        return self.num_seeds / max(1e-9, time.monotonic() - self._started)

    def fields(self) -> dict[str, object]:
        """Return what --json prints: the digest is that of all histories, the same for the same seeds."""
        return {
            "seeds": self.num_seeds,
            "valid": self.num_valid,
            "faults": sum(self.faults.values()),
            "faults_by_kind": dict(sorted(self.faults.items())),
            "unknown": dict(sorted(self.unknown.items())),
            "virtual_hours": round(self.virtual_s / 3600, 3),
            "runs_per_s": round(self.runs_per_s, 2),
            "digest": self._digest.hexdigest(),
            "replay": self.failed[0].replay if self.failed else None,
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


def run_seeds(seeds: Iterable[int], minutes: float | None, nodes: int | None, is_quiet: bool) -> Tally:
    """Run seed after seed until they, or the minutes, are over."""
    tally, shown_at = Tally(), time.monotonic()
    until = None if minutes is None else time.monotonic() + 60 * minutes
    for outcome in (simulate(case_of(seed, nodes)) for seed in _until(seeds, until)):
        tally.take(outcome)
        if outcome.violations and not is_quiet:
            _tell(outcome)
        if not is_quiet and time.monotonic() - shown_at > SHOW_EVERY_S:
            shown_at = time.monotonic()
            console.print(str(tally))
    return tally


def _until(seeds: Iterable[int], until: float | None) -> Iterator[int]:
    for seed in seeds:
        if until is not None and time.monotonic() > until:
            return
        yield seed


def report(tally: Tally, is_json: bool, nodes: int | None) -> int:
    """Print what came of it; return 0 if no run was bad. The first bad one is shrunk and kept as a file."""
    if not is_json:
        table = Table("fault", "times", header_style="bold")
        for kind, times in sorted(tally.faults.items()):
            table.add_row(kind, str(times))
        console.print(table)
        console.print(f"{tally}\ndigest {tally.fields()['digest']}")
    if tally.failed:
        first = tally.failed[0]
        path = keep(first)
        sys.stderr.write(
            f"violated: {first.violations[0].invariant}: {first.violations[0].why}\n"
            f"again with: {first.replay}{'' if nodes is None else f' --nodes {nodes}'}\n"
            f"shrunk with: elastic-chaos sim --case {path}\n"
        )
    if is_json:
        sys.stdout.write(json.dumps(tally.fields()) + "\n")
    return 1 if tally.failed else 0


def run_one(case: Case, is_json: bool) -> int:
    """Run one case and show every finding."""
    tally, outcome = Tally(), simulate(case)
    tally.take(outcome)
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
