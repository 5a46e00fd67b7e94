"""`elastic-train report`: what happened in one run or several, as tables, as JSON, or as a page with charts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from elastic_train.cli.output import Json, console, print_done, print_json, print_table, print_text
from elastic_train.errors import ConfigError
from elastic_train.runs import tables
from elastic_train.runs.memory import read_plan
from elastic_train.runs.report import RunReport, reports_on
from elastic_train.system.files import write_atomically

MOST_CHANGES, MOST_RANKS = 20, 16


def report(runs: list[str], /, *, html: Path | None = None, plan: Path | None = None, json_: Json = False) -> int:
    """Summarise runs: progress, time, cost of faults, phases, saves.

    Several runs are shown side by side. RUN is a folder; the run may still train, or have failed. --html FILE: write a
    self-contained page with curves, throughput and the phases of all ranks. --plan FILE: show the output of
    `elastic-train plan --json` next to the measured memory.
    """
    found = reports_on(runs, planned=None if plan is None else read_plan(plan))
    if html is not None:
        from elastic_train.runs.page import render

        _write(html, render(found))
    if json_:
        return print_json([each.as_json() for each in found])
    _show(found)
    return print_done(str(html), "open it in a browser") if html is not None else 0


def _write(html: Path, page: str) -> None:
    try:
        write_atomically(html, page)
    except OSError as error:
        raise ConfigError(
            f"--html {html} cannot be written: {error.strerror or error}; name a file elsewhere"
        ) from error


def _show(reports: Sequence[RunReport]) -> None:
    terminal = console()
    names = [each.name for each in reports]
    for each in reports:
        for note in each.notes:
            terminal.print(Text(f"{each.name}: {note}", style="yellow"), soft_wrap=True)
    sections = {
        "": tables.summary(reports),
        "what the time was spent on": tables.spent(reports),
        "a step, mean over ranks": tables.phases(reports),
        "layout and environment": tables.layout(reports),
    }
    for title, rows in sections.items():
        if rows:
            print_table((title, *names), rows)
    for each in reports:
        if each.changes:
            print_table(tables.CHANGE_HEAD, tables.changes(each)[-MOST_CHANGES:], f"{each.name}: changes of the world")
        head, rows = tables.memory(each, MOST_RANKS)
        if rows:
            print_table(head, rows, f"{each.name}: memory of ranks")
        if rows := tables.events(each):
            print_table(tables.EVENT_HEAD, rows[-MOST_CHANGES:], f"{each.name}: events")
        for word, lines in (
            ("", each.coverage.proven),
            ("NOT PROVEN: ", each.coverage.unproven),
            ("WRONG: ", each.coverage.wrong),
        ):
            for line in lines:
                print_text(f"{each.name}: {word}{line}")
