"""Progress of long work: a bar on a terminal, plain lines elsewhere, nothing in a library call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import track as rich_track

Item = TypeVar("Item")


class Track(Protocol):
    """Passes items through unchanged and shows how many are done."""

    def __call__(self, items: Iterable[Item], what: str, total: int) -> Iterable[Item]: ...


def silent(items: Iterable[Item], what: str, total: int) -> Iterable[Item]:
    """Show nothing."""
    return items


def shown(items: Iterable[Item], what: str, total: int) -> Iterable[Item]:
    """Show a bar on a terminal's standard error; elsewhere a line at the start and after each of three quarters."""
    console = Console(markup=False, stderr=True)
    if console.is_terminal:
        return rich_track(items, what, total=total, console=console, transient=True)
    return _lines(items, what, total, console)


def _lines(items: Iterable[Item], what: str, total: int, console: Console) -> Iterator[Item]:
    console.print(f"{what}: {total:,}", highlight=False)
    quarter = max(1, -(-total // 4))
    for done, item in enumerate(items, start=1):
        yield item
        if done % quarter == 0 and done < total:
            console.print(f"{what}: {done / total:.0%}", highlight=False)
