"""A world: who trains together, in which order, and where they meet; and its record in the store.

A world's record names all its members and all of them read it, so its bytes grow with the square of its size. Since
format 2 it has runs of neighbouring seats, and of each member id only what it does not share with the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import groupby, takewhile
from typing import Any, Literal

from rendezvous.membership.lenient_json import UnreadableRecordError, from_fields

Cause = Literal["start", "lost", "joined", "restart"]


@dataclass(frozen=True, slots=True)
class Seat:
    """A member's place in a world: the first seat is group rank 0."""

    member: str
    num_workers: int
    role: str = ""


@dataclass(frozen=True)
class World:
    """The members that train together, in rank order, and the address of the TCPStore hosted by the first."""

    term: int
    seats: tuple[Seat, ...]
    cause: Cause
    address: str
    port: int
    sealed_at: float
    left: tuple[str, ...] = ()
    """Members that have left after their workers finished, while others still worked: they are not lost."""

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return {seat.member: rank for rank, seat in enumerate(self.seats)}

    def rank_of(self, member_id: str) -> int | None:
        return self._ranks.get(member_id)

    def pack(self) -> dict[str, object]:
        """Return the fields of its record."""
        runs = [
            _Run(tuple(_shorten(seat.member for seat in seats)), num_workers, role)
            for (num_workers, role), seats in groupby(self.seats, key=lambda seat: (seat.num_workers, seat.role))
        ]
        others = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "seats"}
        return {"format": 2, "runs": runs, **others}

    @staticmethod
    def unpack(found: dict[str, Any]) -> Mapping[str, Any]:
        """Return the fields of a world from those of its record, which has seats up to format 1.

        Raises UnreadableRecordError.
        """
        if "runs" not in found:
            return found
        runs = from_fields(_Runs, found).runs
        try:
            seats = [Seat(member, run.num_workers, run.role) for run in runs for member in _restore(run.members)]
        except ValueError as error:
            raise UnreadableRecordError(f"runs: {error}") from None
        return {**found, "seats": [asdict(seat) for seat in seats]}


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring seats with as many workers each, in one role."""

    members: tuple[str, ...]
    """Of each id the number of characters that it shares with the one before, a colon, and the rest."""
    num_workers: int
    role: str


@dataclass(frozen=True, slots=True)
class _Runs:
    runs: tuple[_Run, ...]


def _shorten(ids: Iterable[str]) -> Iterator[str]:
    before = ""
    for member in ids:
        pairs = zip(before, member, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        yield f"{shared}:{member[shared:]}"
        before = member


def _restore(shortened: Iterable[str]) -> Iterator[str]:
    """Yield the ids again; raises ValueError for what `_shorten` has not written."""
    before = ""
    for text in shortened:
        shared, colon, rest = text.partition(":")
        if not colon or not 0 <= int(shared) <= len(before):
            raise ValueError(f"{text[:40]!r} does not continue {before[:40]!r}")
        before = before[: int(shared)] + rest
        yield before
