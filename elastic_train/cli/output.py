"""The types of flags that commands share, and their output as text, JSON and tables."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import (
    CycloptsError,
    CycloptsPanel,
    MissingArgumentError,
    Parameter,
    UnusedCliTokensError,
    default_name_transform,
)
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from elastic_train.config.sources import load
from elastic_train.errors import ConfigError
from elastic_train.launch.options import Flags
from elastic_train.system.wording import done

CONFIG = "config.yaml"
"""The configuration that `elastic-train init` writes; the commands that it needs are in its head."""
Json = Annotated[bool, Parameter(name="--json", negative="")]
Flag = Annotated[bool, Parameter(negative="")]
NO_EMPTY = Parameter(negative_iterable="")
"""For a whole program: no `--empty-...` for options that take several values."""
Overrides = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
"""Keys of a configuration and their values, between a command's own flags or after them."""
WIDEST = 4096
"""Columns of a line in a file or a pipe, which no terminal wraps."""


def _name_of(field: str) -> str:
    return "id" if field == "run_id" else default_name_transform(field)


LaunchFlags = Annotated[Flags, Parameter(name="*", name_transform=_name_of)]
"""Those of `elastic-train launch`, which other commands take, too."""


def wrong_usage(program: str, error: CycloptsError) -> Panel:
    """Return what to print for arguments that a program cannot take; with its name, an app's `error_formatter`."""
    command = " ".join([program, *(error.command_chain or ())])
    if isinstance(error, MissingArgumentError) and error.keyword is None and error.target and error.argument:
        needed = _needed(error.target)
        missing = needed.get(error.argument.field_info.name, error.argument.name)
        return CycloptsPanel(f"{missing} is missing: write {command} {' '.join(needed.values())}. See {command} --help")
    if not isinstance(error, UnusedCliTokensError):
        return CycloptsPanel(error)
    words = " ".join(error.unused_tokens or ())
    reason = "it is one too many, or the option before it has no value"
    return CycloptsPanel(f"unexpected argument '{words}': {reason}. See {command} --help")


def _needed(command: Callable[..., object]) -> dict[str, str]:
    """Return how to write each argument that a command needs, by its parameter's name, in their order."""
    needed = {}
    for each in inspect.signature(command).parameters.values():
        if each.default is each.empty and each.kind != each.VAR_POSITIONAL:
            option = f"--{default_name_transform(each.name)} " if each.kind == each.KEYWORD_ONLY else ""
            needed[each.name] = option + each.name.upper()
    return needed


PIPE_CLOSED = 128 + 13
"""Exit code of a program whose output is no longer read, as after SIGPIPE."""


@contextlib.contextmanager
def quiet_output() -> Iterator[None]:
    """End quietly where the reader of standard output has gone, as `head` does; do without one that is closed."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is flushed at exit goes nowhere
        sys.exit(PIPE_CLOSED)


def print_text(text: str) -> int:
    """Print text as it is, without markup or wrapping; return the exit code of success."""
    sys.stdout.write(text + "\n")
    return 0


def print_done(made: str, then: str) -> int:
    """Print a command's last line: what it made, and what to do next."""
    return print_text(done(made, then))


def print_made(out: str, otherwise: str) -> int:
    """Print the last line of a command that made a dataset at `out`.

    The next command is the one that the configuration in the working folder needs, else `otherwise`.
    """
    return print_done(out, _next_for_config(Path(out).absolute()) or otherwise)


def _next_for_config(out: Path) -> str | None:
    """Return the command after the one that makes `out` in the head of CONFIG, or that trains on `out`."""
    try:
        lines, trained_on = Path(CONFIG).read_text().splitlines(), load(Path(CONFIG), environ={}).data.sources
        head = [shlex.split(line[1:], comments=True) for line in lines if line.startswith("#   ")]
    except (OSError, ValueError, ConfigError):
        return None
    for words, following in itertools.pairwise(head):
        made = words[4:5] if words[:3] == ["elastic-train", "data", "import"] else words[3:4]
        if words[:2] == ["elastic-train", "data"] and made and Path(made[0]).absolute() == out:
            return shlex.join(following)
    is_read = any(Path(source).absolute() in (out, out / "train") for source in trained_on)
    return f"elastic-train train {CONFIG}" if is_read else None


def print_json(value: object) -> int:
    """Print a value as indented JSON; return the exit code of success."""
    return print_text(json.dumps(value, indent=2))


def console() -> Console:
    """Return a console for tables; a file or a pipe has room for rows of any length."""
    found = Console(markup=False, highlight=False)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = WIDEST
    return found


class NarrowTable(Table):
    """A table without vertical lines, in which no word is cut.

    Columns for which a terminal has no room follow in further tables, each of which begins with the first column.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [_widths(console, [column.header, *column.cells]) for column in self.columns]
        lo, end = 1, len(self.columns)
        while lo == 1 or lo < end:
            hi = min(lo + 1, end)
            while hi < end and _room(options, widths, lo, hi + 1) >= 0:
                hi += 1
            places = [0, *range(lo, hi)]
            room, part = _room(options, widths, lo, hi), copy.copy(self)
            chosen = _spread([widths[place] for place in places], max(0, room))
            if room < 0:  # a word is longer than a line; the first column's need not be cut for it
                chosen[0] = min(widths[0][1], options.max_width // 2) if len(places) > 1 else chosen[0]
                chosen[-1] = max(1, chosen[-1] - sum(chosen) + options.max_width - 2 * len(chosen) - 1)
            part.columns = [
                replace(self.columns[place], _index=number, overflow="fold", width=chosen[number])
                for number, place in enumerate(places)
            ]
            part.title, part.caption = self.title if lo == 1 else None, self.caption if hi == end else None
            yield from Table.__rich_console__(part, console, options)
            lo = max(2, hi)


def _widths(console: Console, cells: Iterable[RenderableType]) -> tuple[int, int]:
    """Return the widths of a column whose cells are broken at every space, and at none."""
    found = [Measurement.get(console, console.options.update(max_width=WIDEST), each) for each in cells]
    return max(1, *(each.minimum for each in found)), max(1, *(each.maximum for each in found))


def _room(options: ConsoleOptions, widths: Sequence[tuple[int, int]], lo: int, hi: int) -> int:
    """Return the columns that a table of the first column and [lo, hi) leaves of the terminal; negative if too wide."""
    least = [widths[0][0], *(low for low, _ in widths[lo:hi])]
    return options.max_width - sum(least) - 2 * len(least) - 1  # a space after each, between them, and at both edges


def _spread(widths: Sequence[tuple[int, int]], spare: int) -> list[int]:
    """Return the width of each column: its least, and of the spare ones as many as it can use, the same for all."""
    chosen = [low for low, _ in widths]
    by_use = sorted(range(len(widths)), key=lambda place: widths[place][1] - widths[place][0])
    for rank, place in enumerate(by_use):
        more = min(widths[place][1] - widths[place][0], spare // (len(widths) - rank))
        chosen[place], spare = chosen[place] + more, spare - more
    return chosen


def narrow_table(*columns: str) -> NarrowTable:
    """Return an empty table without vertical lines, for many columns on a terminal."""
    return NarrowTable(*columns, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Print a narrow table below its title; cells are texts with a style, or values as `cell` shows them."""
    table = narrow_table(*head)
    for row in rows:
        table.add_row(*(value if isinstance(value, Text) else Text(cell(value)) for value in row))
    if title:
        print_text(title)
    console().print(table)


def cell(value: object) -> str:
    """Return a value as a table's cell: '-' for None, four digits of a float."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
