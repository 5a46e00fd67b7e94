"""Progress of long work: a bar on a terminal, plain lines elsewhere, nothing in a library call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import Progress

Item = TypeVar("Item")


class Track(Protocol):
    """Passes items through unchanged and shows how many are done."""

    def __call__(self, items: Iterable[Item], what: str, total: int, unit: str = "") -> Iterable[Item]: ...


def silent(items: Iterable[Item], what: str, total: int, unit: str = "") -> Iterable[Item]:
    return items


def shown(items: Iterable[Item], what: str, total: int, unit: str = "") -> Iterator[Item]:
    """Show a bar on a terminal's standard error; elsewhere a line at 0 %, after each quarter and at 100 %.

    `unit` is what `total` counts, in the plural; without it only the percentage is shown.
    """
    console = Console(markup=False, stderr=True)
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield from _counted(items, lambda done: bar.update(task, completed=done))
        return
    quarter = max(1, -(-total // 4))

    def show(done: int) -> None:
        if done % quarter == 0 or done == total:
            console.print(progress_line(what, done, total, unit), highlight=False, soft_wrap=True)

    show(0)
    yield from _counted(items, show)


def progress_line(what: str, done: int, total: int, unit: str = "") -> str:
    """Return how far some work is, as every command says it."""
    counter = f"{done:,} of {total:,} {unit}, " if unit else ""
    return f"{what}: {counter}{percent(done, total)}"


def percent(done: int, total: int) -> str:
    """Return a share in whole percent; only finished work has 100 %."""
    return f"{100 * done // max(1, total)}%"


def _counted(items: Iterable[Item], show: Callable[[int], None]) -> Iterator[Item]:
    """Yield the items and report each; holds none of them, as they may be large."""
    done = 0
    for item in items:
        yield item
        del item
        show(done := done + 1)
