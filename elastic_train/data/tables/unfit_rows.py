"""Rows that an import cannot use: rejected together, or left out and listed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from elastic_train.errors import ConfigError

_MOST_NAMED = 50


@dataclass(slots=True)
class UnfitRows:
    """Lines about unusable rows; with `skips` the rows are left out.

    `remedy` ends a rejection whose lines have none of their own.
    """

    noun: ClassVar[str] = "row"
    remedy: ClassVar[str | None] = None
    skips: bool = False
    wrong: list[str] = field(default_factory=list)

    def finish(self) -> None:
        """Raise ConfigError with all unusable rows, unless they are left out."""
        if self.wrong and not self.skips:
            more = len(self.wrong) - _MOST_NAMED
            rest = [f"and {more:,} {self.noun}s more"] if more > 0 else []
            raise ConfigError(*self.wrong[:_MOST_NAMED], *rest, *([self.remedy] if self.remedy else []))
