"""Progress of long work: a bar on a terminal, plain lines elsewhere, nothing in a library call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import track as rich_track

Item = TypeVar("Item")


class Track(Protocol):
    """Passes items through unchanged and shows how many are done."""

    def __call__(self, items: Iterable[Item], what: str, total: int, unit: str = "") -> Iterable[Item]: ...


def silent(items: Iterable[Item], what: str, total: int, unit: str = "") -> Iterable[Item]:
    """Show nothing."""
    return items


def shown(items: Iterable[Item], what: str, total: int, unit: str = "") -> Iterable[Item]:
    """Show a bar on a terminal's standard error; elsewhere a line at 0 %, after each quarter and at 100 %.

    `unit` is what `total` counts, in the plural; without it only the percentage is shown.
    """
    console = Console(markup=False, stderr=True)
    if console.is_terminal:
        return rich_track(items, what, total=total, console=console, transient=True)
    return _lines(items, what, total, unit, console)


def _lines(items: Iterable[Item], what: str, total: int, unit: str, console: Console) -> Iterator[Item]:
    def show(done: int) -> None:
        counter = f"{done:,} of {total:,} {unit}, " if unit else ""
        console.print(f"{what}: {counter}{done / max(1, total):.0%}", highlight=False, soft_wrap=True)

    show(0)
    quarter = max(1, -(-total // 4))
    for done, item in enumerate(items, start=1):
        yield item
        if done % quarter == 0 or done == total:
            show(done)
