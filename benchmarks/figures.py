"""The command line of a benchmark with several figures: choose figures and effort, and print the results."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Effort:
    """The amount to measure, and the function that reports progress."""

    is_quick: bool
    say: Callable[[str], None]


Measure = Callable[[Effort], dict[str, object]]
"""Returns figures by name; a figure with cases is a mapping of them."""


def measure_chosen(program: str, explanation: str | None, figures: Mapping[str, Measure]) -> None:
    """Measure the chosen figures; print a table, then one JSON line.

    `explanation` has a paragraph for each figure. A function that gives several figures runs once.
    """
    arguments = argparse.ArgumentParser(
        prog=f"python -m {program}", description=explanation, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--json", action="store_true", help="print the last line only, and progress to stderr")
    arguments.add_argument("--quick", action="store_true", help="fewer rounds, worlds and faults, for a look")
    arguments.add_argument("--only", choices=figures, metavar="NAME", help="measure one figure, and what comes with it")
    chosen = arguments.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    progress = Console(stderr=True, highlight=False)
    found: dict[str, object] = {}
    for measure in [figures[chosen.only]] if chosen.only else dict.fromkeys(figures.values()):
        progress.print(f"[bold]{', '.join(name for name, by in figures.items() if by is measure)}")
        found |= measure(Effort(chosen.quick, progress.print))
    if not chosen.json:
        table = Table("figure", "case", "value")
        for name, values in found.items():
            for case, value in values.items() if isinstance(values, dict) else [("", values)]:
                table.add_row(name, case, str(value))
        Console().print(table)
    print(json.dumps(found))


def rewrite(path: Path, begin: str, end: str, section: Callable[[str], str]) -> None:
    """Replace the text between two marks of a document by what `section` makes of it."""
    before, mark, rest = path.read_text().partition(begin)
    old, last, after = rest.partition(end)
    if not (mark and last):
        raise SystemExit(f"{path}: has no {begin} … {end} to write the figures to")
    path.write_text(f"{before}{begin}\n{section(old)}\n{end}{after}")
